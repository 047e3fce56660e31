"""Libraries whose convolutions a CPU may use besides those of XLA.

This is the only place that registers them. Other modules use the attributes of
a `Library` and never compare its name.
"""

from collections.abc import Callable
import contextlib
from typing import Any, NamedTuple

import jax

from fedjax_het.kernels import onednn
from fedjax_het.kernels.onednn import no_compilation_cache


class Library(NamedTuple):
  """Convolutions of another library.

  Attributes:
    title: Its name in messages.
    choose: `(lowering, patches_shape, strides, dtype, channels) -> Lowering`,
      with the passes replaced for which the library is faster.
    forward: The convolution, called like those of `kernels.conv.FORWARD`.
    d_input: The gradient of the input.
    d_weight: The gradient of the kernel.
    why_not: `() -> str | None`, the reason why it is unavailable in this
      process.
    check: `() -> None`, raises ValueError with that reason.
    is_cacheable: Whether JAX's compilation cache can store its programs.
  """

  title: str
  choose: Callable[..., Any]
  forward: Callable[..., jax.Array]
  d_input: Callable[..., jax.Array]
  d_weight: Callable[..., jax.Array]
  why_not: Callable[[], str | None]
  check: Callable[[], None]
  is_cacheable: bool


LIBRARIES = {
    'onednn': Library(
        'oneDNN',
        onednn.choose,
        onednn.forward,
        onednn.d_input,
        onednn.d_weight,
        onednn.why_not,
        onednn.check,
        is_cacheable=False,
    )
}
CONV_BACKENDS = ('xla', *LIBRARIES)
# With this value each run chooses the library, see `experiment.form`.
AUTO = 'auto'


def concrete(conv_backend: str) -> str:
  """Replaces `AUTO` by 'xla', its choice without measurements."""
  return 'xla' if conv_backend == AUTO else conv_backend


def title(conv_backend: str) -> str:
  """The name of one of `CONV_BACKENDS` in messages."""
  library = LIBRARIES.get(conv_backend)
  return 'XLA' if library is None else library.title


def why_not(conv_backend: str) -> str | None:
  """The reason why one of `CONV_BACKENDS` is unavailable here, or None."""
  library = LIBRARIES.get(conv_backend)
  return None if library is None else library.why_not()


def check(conv_backend: str) -> None:
  """Raises ValueError if one of `CONV_BACKENDS` is unavailable here."""
  if library := LIBRARIES.get(conv_backend):
    library.check()


def uncacheable(conv_backend: str) -> str | None:
  """The title of a library whose programs cannot be stored on disk.

  Args:
    conv_backend: One of `CONV_BACKENDS`, or any other name.

  Returns:
    The title; None if programs can be stored, or for any other name.
  """
  library = LIBRARIES.get(conv_backend)
  return library.title if library and not library.is_cacheable else None


def allowed_cache(conv_backend: str) -> contextlib.AbstractContextManager:
  """A context that disables JAX's compilation cache if the library needs it.

  Args:
    conv_backend: As in `uncacheable`.

  Returns:
    A context manager.
  """
  if uncacheable(conv_backend):
    return no_compilation_cache()
  return contextlib.nullcontext()
