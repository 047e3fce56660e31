"""Ctrl-C and SIGTERM: the first stops in an orderly way, the second at once."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

# Whether Ctrl-C came in `second_ends_at_once`.
_came = threading.Event()


@contextlib.contextmanager
def watched(
    first: Callable[[], None],
    second: Callable[[], None],
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    handler: Callable = lambda number, frame: None,
) -> Iterator[None]:
  """Calls functions at the first and at the second signal.

  A separate thread calls them, because Python runs signal handlers only in the
  main thread, which may be compiling for a minute.

  Args:
    first: Called at the first signal.
    second: Called at the second one; it should end the process.
    signals: The signals.
    handler: Python signal handler, which the main thread calls as well.

  Yields:
    Nothing.
  """
  reader, writer = socket.socketpair()
  writer.setblocking(False)

  def watch():
    count = 0
    while numbers := reader.recv(16):
      for number in numbers:
        if number in signals:
          count += 1
          first() if count == 1 else second()

  # Python writes the number of each handled signal to this file.
  old_file = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  old = {number: signal.signal(number, handler) for number in signals}
  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  try:
    yield
  finally:
    for number, previous in old.items():
      signal.signal(number, previous)
    signal.set_wakeup_fd(old_file)
    writer.close()
    thread.join()
    reader.close()


@contextlib.contextmanager
def second_ends_at_once() -> Iterator[None]:
  """Makes the first Ctrl-C a KeyboardInterrupt and the second end the process.

  The first prints a line, because the exception waits until a compilation ends.
  Until JAX is imported, the first ends the process: there is nothing to lose,
  and an exception in the middle of that import can abort Python. It is meant
  for a whole program: a Ctrl-C after the context also ends the process. If
  Ctrl-C is ignored or has a handler, nothing changes.

  Yields:
    Nothing.
  """
  if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    yield
    return
  _came.clear()
  hook = sys.unraisablehook
  sys.unraisablehook = functools.partial(_unraisable, hook)
  try:
    with watched(_say, _leave, (signal.SIGINT,), _interrupt):
      yield
  finally:
    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_if_it_came() -> None:
  """Raises KeyboardInterrupt if Ctrl-C came in `second_ends_at_once` before.

  An exception in a callback of the garbage collector, such as JAX's, is lost.
  Call it before work that handles Ctrl-C in another way.
  """
  if _came.is_set():
    raise KeyboardInterrupt


def _unraisable(hook: Callable, lost) -> None:
  """Prints no traceback of a Ctrl-C; `raise_if_it_came` raises it again."""
  if not issubclass(lost.exc_type, KeyboardInterrupt):
    hook(lost)


def _jax_is_imported() -> bool:
  found = sys.modules.get('jax')
  # Python marks a module this way while its code runs.
  return found is not None and not getattr(
      found.__spec__, '_initializing', False
  )


def _interrupt(number, frame) -> None:
  if not _jax_is_imported():
    _leave()
  _came.set()
  signal.default_int_handler(number, frame)


def _say() -> None:
  if not _jax_is_imported():
    return  # The handler ends the process.
  print(
      '\nStopping: waiting for the compilation or computation that runs now. '
      'Once more stops at once.',
      file=sys.stderr,
      flush=True,
  )


def _leave() -> NoReturn:
  print('\nInterrupted.', file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(130)
