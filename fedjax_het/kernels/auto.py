"""The choices of `auto`: one row for each kind of device.

`python -m benchmarks.accelerator --out=DIR` measures a row on the device that
JAX finds, and `python -m benchmarks.accelerator.apply --out=DIR` writes it
here. A kind of device without a row uses `UNMEASURED`.
"""

import contextlib
from typing import NamedTuple

import jax


class Choice(NamedTuple):
  """The row of a kind of device.

  Attributes:
    backend: How clients are mapped on one device, 'map' or 'vmap'.
    chunk: Clients in a batch of 'vmap'.
    lowering: Lowering of convolutions of one client at a time: a name of
      `kernels.lowering`, or 'by_layer' for its rules for CPUs.
    batched_lowering: Lowering of convolutions while clients are batched.
    source: The measurements from which it was chosen.
  """

  backend: str
  chunk: int
  lowering: str
  batched_lowering: str
  source: str


# {`device_kind` of JAX: row}. `benchmarks.accelerator.apply` adds rows.
CHOICES = {
    'cpu': Choice(
        backend='map',
        chunk=16,
        lowering='by_layer',
        batched_lowering='gemm',
        source='benchmarks.engine, benchmarks.lowerings, docs/results/speed.md',
    ),
}
# A guess: batches keep an accelerator busy. The chunk bounds memory.
UNMEASURED = Choice('vmap', 16, 'native', 'native', 'not measured')

_choice = jax.make_user_context(default_value=None)


def using_choice(choice: Choice) -> contextlib.AbstractContextManager:
  """A context in which `auto` uses another row, for example to measure it.

  It is local to the thread and part of the cache key of `jax.jit`.

  Args:
    choice: The row.

  Returns:
    A context manager.
  """
  return _choice(choice)


def auto_choice(kind: str | None = None) -> Choice:
  """The row that `auto` follows.

  Args:
    kind: A `device_kind` of JAX; None for the row of `using_choice`, or else of
      the default device.

  Returns:
    The row; `UNMEASURED` for a kind that has none.
  """
  if kind is None and _choice.value is not None:
    return _choice.value
  return CHOICES.get(kind or jax.devices()[0].device_kind, UNMEASURED)
