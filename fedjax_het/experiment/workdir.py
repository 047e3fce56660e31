"""The folder of a run: its lock and its config."""

from collections.abc import Iterator, Mapping
import contextlib
import datetime
import json
import os
import pathlib
import re
from typing import IO, Any

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.needs import needs_of
from fedjax_het.experiment import config as config_lib
from fedjax_het.experiment import stored_config
from fedjax_het.files import as_json, write_atomically
from fedjax_het.reporting.run_files import read_config

try:
  import fcntl
except ImportError:  # On Windows.
  fcntl = None

# Entries that may change when a run is resumed, because they do not affect what
# the rounds compute. So may `num_rounds`, unless the schedule or the method
# depends on it.
FREE = (
    'data_dir',
    'data_file',
    'verify',
    'eval_every',
    'eval_batch_size',
    'eval_clients_per_group',
    'personal_test',
    'partition.file',
    'target_accuracy',
    'checkpoint_every',
    'keep_checkpoints',
    'nonfinite',
    'tensorboard',
    'compilation_cache',
    *(f'callbacks.{name}' for name in config_lib.CALLBACKS),
)


def new_workdir(config, parent: str | os.PathLike = 'runs') -> pathlib.Path:
  """A path that does not exist yet, named after the experiment and the time.

  Args:
    config: The config.
    parent: Its parent folder.

  Returns:
    A path such as runs/fedin-digits-dirichlet-20260131-235959-123.
  """
  # With milliseconds, for runs that are started together.
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')[:-3]
  parts = (config.algorithm.name, config.dataset, config.partition.name, now)
  # A data set's name may hold a slash, such as tfds:NAME/CONFIG.
  name = re.sub(r'[^\w.-]', '_', '-'.join(parts))
  path = pathlib.Path(parent) / name
  suffix = 1
  while path.exists():
    suffix += 1
    path = pathlib.Path(parent) / f'{name}-{suffix}'
  return path


# Values that older versions, without 'auto', used instead of it.
_BEFORE_AUTO = {'conv_backend': 'xla'}
# Files and folders that a run writes.
_FILES = (
    'config.json', 'facts.json', 'form.json', 'report.md',
    'partition.png', 'curves.png', 'times.png',
    'confusion.npz', 'confusion.png', 'classes.png', 'clients.png',
    'train.csv', 'test.csv', 'validation.csv', 'warm_up.csv',
)  # fmt: skip
_FOLDERS = (
    'checkpoints', 'best', 'profile', 'tensorboard', 'wandb', 'mlflow',
)  # fmt: skip


def _check_places(folder: pathlib.Path) -> None:
  """Raises ValueError if a path that a run writes has the wrong type.

  metrics.jsonl is not checked, because a run restores it.
  """
  for names, right, words in (
      (_FILES, pathlib.Path.is_file, 'a file'),
      (_FOLDERS, pathlib.Path.is_dir, 'a folder'),
  ):
    for name in names:
      path = folder / name
      if os.path.lexists(path) and not right(path):
        raise ValueError(f'{path} is not {words}; move it away.')


def hold(file: IO[str], stack: contextlib.ExitStack) -> None:
  """Locks an open file until the stack or the process ends.

  Args:
    file: The file.
    stack: Releases the lock when it is closed.

  Raises:
    BlockingIOError: If another process holds it.
  """
  if fcntl is not None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return
  import filelock

  # Lock another file, because on Windows others cannot read a locked one.
  try:
    stack.enter_context(filelock.FileLock(f'{file.name}ed', blocking=False))
  except filelock.Timeout as e:
    raise BlockingIOError(str(e)) from e


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
  """Creates the folder, and locks it for this process.

  The operating system releases the lock when the process ends, even if it is
  killed.

  Args:
    folder: The workdir.

  Yields:
    Nothing.

  Raises:
    ValueError: If another process holds the lock, or the path is not a folder
      or cannot be written.
  """
  path = folder / '.lock'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not path.is_file():
      raise ValueError(f'{path} is not a file; move it away.')
    file = open(path, 'a+', encoding='utf-8', errors='replace')
  except (FileExistsError, NotADirectoryError) as e:
    raise ValueError(f'The workdir {folder} is a file, not a folder.') from e
  except OSError as e:
    raise ValueError(
        f'The workdir {folder} cannot be written: {e.strerror}.'
    ) from e
  with file, contextlib.ExitStack() as stack:
    try:
      hold(file, stack)
    except BlockingIOError as e:
      file.seek(0)
      owner = file.read(20).split('\n')[0].strip()
      raise ValueError(
          f'The workdir {folder} is in use by process {owner}; wait for it or '
          'choose another one.'
      ) from e
    file.truncate(0)
    file.write(f'{os.getpid()}\n')
    file.flush()
    yield


def settle_config(folder: pathlib.Path, config) -> bool:
  """Stores the config in a new workdir, or compares it with the one there.

  A stored config is not changed; see `store_config`.

  Args:
    folder: The workdir.
    config: The config.

  Returns:
    Whether the workdir is new.

  Raises:
    ValueError: As `check_workdir`.
    OSError: If config.json cannot be written.
  """
  new = check_workdir(folder, config)
  if new:
    store_config(folder, config)
  return new


def check_workdir(folder: pathlib.Path, config) -> bool:
  """Checks that a run of a config may begin or go on in a folder.

  Args:
    folder: The workdir, which may not exist yet.
    config: The config.

  Returns:
    Whether it holds no run yet.

  Raises:
    ValueError: If the workdir holds a run of another config, or one whose
      config is lost; in one line that names the first entries that differ. Or
      if it holds files of others that the run would replace, or a path that
      the run writes has the wrong type.
  """
  _check_places(folder)
  if (folder / 'config.json').exists():
    mine = as_json(config)
    differences = _differences(mine, read_config(folder))
    if differences:
      more = len(differences) - 3
      raise ValueError(
          f'The workdir {folder} holds a run of another config: '
          + '; '.join(differences[:3])
          + (f'; and {more} more' if more > 0 else '')
          + '. Choose another workdir, or the config of that run.'
      )
    return False
  for name in ('metrics.jsonl', 'checkpoints'):
    if os.path.lexists(folder / name):
      raise ValueError(
          f'The workdir {folder} holds {name} but no config.json, so its '
          'run cannot be resumed; choose another workdir.'
      )
  for name in (*_FILES, *_FOLDERS):
    if os.path.lexists(folder / name):
      raise ValueError(
          f'The workdir {folder} holds no run, but {name}, which a run '
          'replaces; choose another workdir.'
      )
  return True


def store_config(folder: pathlib.Path, config) -> None:
  """Stores the config, with new values of the entries that may change.

  Args:
    folder: The workdir.
    config: The config.

  Raises:
    OSError: If config.json cannot be written.
  """
  mine = as_json(config)
  text = json.dumps(mine, indent=2, sort_keys=True) + '\n'
  write_atomically(folder / 'config.json', text)


def _differences(mine: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
  """Messages on entries that differ but must be equal."""
  free, method = FREE, mine['algorithm']['name']
  by_rounds = method if needs_of(ALGORITHMS[method]).num_rounds else None
  if mine['local']['schedule'] == 'cosine':
    by_rounds = 'local.schedule'
  if by_rounds is None:
    free += ('num_rounds',)
  new, was = _flat(mine), _flat(old)
  defaults = {
      name: value
      for name, value in _flat(
          config_lib.default_config(method).to_dict()
      ).items()
      if name.split('.')[0] in (
          *config_lib.FIELDS, 'local', 'algorithm', 'clock'
      )
  }
  defaults |= _BEFORE_AUTO | _flat(stored_config.older_entries(old))
  sentences = []
  for name in sorted({*new, *was}):
    # An entry that a newer version added had its default so far, or its value
    # in `older_entries`.
    before = was.get(name, defaults.get(name))
    if name in _BEFORE_AUTO and new.get(name) == 'auto':
      before = 'auto' if before == _BEFORE_AUTO[name] else before
    if name not in free and new.get(name) != before:
      there, here = (_show(d, name) for d in (was, new))
      sentences.append(f'{name} is {there} there and {here} here')
      if name == 'num_rounds':
        sentences[-1] += f', on which {by_rounds} depends'
  return sentences


def _flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for name, value in tree.items():
    if isinstance(value, Mapping):
      flat.update(_flat(value, f'{prefix}{name}.'))
    else:
      flat[prefix + name] = list(value) if isinstance(value, tuple) else value
  return flat


def _show(flat: Mapping[str, Any], name: str) -> str:
  return repr(flat[name]) if name in flat else 'absent'
