"""Compiles the program of a round while other programs are compiled or run."""

from concurrent import futures
import logging
import time
from typing import NamedTuple

import jax

_log = logging.getLogger(__name__)


class Compiled(NamedTuple):
  """A compiled program, and how long that took.

  Attributes:
    program: The program.
    seconds: Of compiling it, or of loading it from the cache on disk.
  """

  program: jax.stages.Compiled
  seconds: float


def in_thread(lowered: jax.stages.Lowered) -> futures.Future:
  """Compiles a lowered program in a thread; XLA does not hold the GIL.

  Thread-local contexts of the caller do not matter, because the program has
  been traced already.

  Args:
    lowered: The program.

  Returns:
    A future of the `Compiled`, which raises a compilation error.
  """

  def compile_it():
    begin = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - begin
    _log.info('Compiled in %.1f s.', seconds)
    return Compiled(program, seconds)

  _log.info('Compiling the round program ...')
  pool = futures.ThreadPoolExecutor(1, 'compile')
  compiling = pool.submit(compile_it)
  pool.shutdown(wait=False)  # The thread ends with its work.
  return compiling


def planned_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes that XLA planned for a compiled program; {} if it is not known."""
  try:
    stats = compiled.memory_analysis()
    return dict(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes),
        reused=int(stats.alias_size_in_bytes),
        temporary=int(stats.temp_size_in_bytes),
    )
  except (AttributeError, NotImplementedError, TypeError):
    return {}
