"""Compiles the program of a round while other programs are compiled or run."""

from concurrent import futures
import logging
import time

import jax

_log = logging.getLogger(__name__)


def in_thread(lowered: jax.stages.Lowered) -> futures.Future:
  """Compiles a lowered program in a thread; XLA does not hold the GIL.

  Thread-local contexts of the caller do not matter, because the program has
  been traced already.

  Args:
    lowered: The program.

  Returns:
    A future of the `jax.stages.Compiled`, which raises a compilation error.
  """

  def compile_it():
    begin = time.perf_counter()
    compiled = lowered.compile()
    _log.info('Compiled in %.1f s.', time.perf_counter() - begin)
    return compiled

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
