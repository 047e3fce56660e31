r"""Prepares a data set in the format of tensorflow-datasets, once.

  python -m launch.prepare_data --list
  python -m launch.prepare_data --dataset=fashion_mnist --data_dir=DIR \
      [--raw_dir=RAW]

The program reads the official raw files under RAW (default: DIR), checks them,
writes DIR/<dataset>/<version>/ as array_record files, reads these back,
compares, and prints a summary. Training then reads them with
`--config.data_dir=DIR`. The step is optional: `fedjax_het.data.sources.load`
reads raw files too. It saves time for CINIC-10, whose 180,000 small files take
long to open.

Only --download uses TensorFlow and the network. A data set that is already
prepared is read, checked and summarised.
"""

import errno
import importlib.util
import os
import pathlib
import sys

from absl import flags, logging
import numpy as np

from fedjax_het.data import raw_formats, sources, tfds_source
from fedjax_het.names import check_name

from . import terminal
from .terminal import fail, line

_DATASET = flags.DEFINE_string('dataset', None, 'Name; see --list.')
_DATA_DIR = flags.DEFINE_string(
    'data_dir', None, 'Folder that holds prepared data sets; made if missing.'
)
_RAW_DIR = flags.DEFINE_string(
    'raw_dir', None, 'Folder of the raw files; default: --data_dir.'
)
_VERIFY = flags.DEFINE_bool(
    'verify',
    True,
    'Insist on the official checksums and counts; --noverify takes a part of a'
    ' data set as it is.',
)
_DOWNLOAD = flags.DEFINE_bool(
    'download',
    False,
    'Where the raw files are missing, let the stock builder of'
    ' tensorflow-datasets fetch them; needs TensorFlow and the network.',
)
_LIST = flags.DEFINE_bool('list', False, 'Print the known data sets and stop.')


def list_datasets() -> str:
  """A line per data set: size, files, checksums known, where to get it."""
  lines = []
  for name, source in sources.DATASETS.items():
    shape = 'x'.join(map(str, source.image_shape))
    line = (
        f'{name:<14} {shape:<8} {source.num_classes:>3} classes'
        f' {source.num_train:>7,} train {source.num_test:>7,} test  '
    )
    if not source.files:
      lines.append(line + 'embedded in scikit-learn, needs no files')
      continue
    known = 'checksums known' if source.digests else 'no checksum known'
    lines.append(
        f'{line}{source.folders[0]}/{{{",".join(source.files)}}},'
        f' {known}; from {source.url}'
    )
  return '\n'.join(lines)


def summarize(data: sources.Dataset) -> str:
  """Counts, examples per class, statistics and a checksum of the content."""
  splits = raw_formats.Splits(*data[1:5])
  kind = f'{data.train_images.shape[1:]} {data.train_images.dtype}'
  lines = [f'{data.name}: examples {kind}']
  for split, labels in (
      ('train', data.train_labels),
      ('test', data.test_labels),
  ):
    counts = np.bincount(labels, minlength=data.num_classes)
    lines.append(
        f'  {split}: {len(labels):,} examples, {counts.min():,} to'
        f' {counts.max():,} in each of {data.num_classes} classes'
    )
  mean, std = (', '.join(f'{v:.6f}' for v in s) for s in (data.mean, data.std))
  lines.append(f'  mean of train: {mean}; standard deviation: {std}')
  lines.append(f'  sha256 of the arrays: {tfds_source.content_digest(splits)}')
  return '\n'.join(lines)


def download(
    name: str, data_dir: pathlib.Path, raw_dir: pathlib.Path
) -> pathlib.Path:
  """Downloads and prepares with tensorflow-datasets' own builder.

  This is the only function that uses the network. Examples are in the order of
  that builder, not of the raw files.

  Args:
    name: Name of a data set for which tensorflow-datasets has a builder.
    data_dir: Folder that holds all data sets; made if missing.
    raw_dir: Folder of the raw files; official archives directly in it are not
      downloaded again.

  Returns:
    `data_dir/<name>/<version of the stock builder>`.

  Raises:
    ModuleNotFoundError: If TensorFlow, which stock builders need, is missing.
    ValueError: If tensorflow-datasets has no such builder, or the download
      fails or has a wrong checksum.
    FileExistsError: If that version is prepared already.
    OSError: If the disk is full; nothing is left behind.
  """
  if importlib.util.find_spec('tensorflow') is None:
    raise ModuleNotFoundError(
        '--download needs TensorFlow (`pip install tensorflow`), which is not'
        ' installed; without it, put the raw files in place and leave'
        ' --download out.'
    )
  import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

  try:
    builder_class = tfds.builder_cls(name)
  except tfds.core.DatasetNotFoundError as e:
    raise ValueError(
        f'tensorflow-datasets has no builder for {name!r}; fetch its raw files'
        f' from {sources.DATASETS[name].url} and leave --download out.'
    ) from e
  target = data_dir / name / str(builder_class.VERSION)
  if target.exists():
    raise FileExistsError(errno.EEXIST, 'already prepared', str(target))
  with tfds_source.staging(target) as temporary:
    builder = builder_class(data_dir=str(temporary), file_format='array_record')
    config = tfds.download.DownloadConfig(manual_dir=str(raw_dir))
    try:
      builder.download_and_prepare(download_config=config)
    except (
        tfds.download.DownloadError,
        tfds.download.download_manager.NonMatchingChecksumError,
    ) as e:
      raise ValueError(f'Fetching {name} failed: {e}') from e
  return target


def prepare(
    name: str,
    data_dir: str | pathlib.Path | None,
    raw_dir: str | pathlib.Path | None = None,
    *,
    verify: bool = True,
    allow_download: bool = False,
) -> str:
  """Prepares one data set, or checks one that is prepared already.

  Args:
    name: Key in `sources.DATASETS`.
    data_dir: Folder that holds prepared data sets; made if missing.
    raw_dir: Folder of the raw files; None for `data_dir`.
    verify: See `sources.load`.
    allow_download: Whether tensorflow-datasets may fetch missing raw files.

  Returns:
    What was done, and a summary of the data, in a few lines.

  Raises:
    FileNotFoundError: If raw files are missing.
    ImportError: If tensorflow-datasets is not installed.
    OSError: If the disk is full.
    ValueError: If the name is unknown, `data_dir` is missing, or a file's
      contents are wrong.
  """
  check_name('data set', name, sources.DATASETS)
  if not sources.DATASETS[name].files:
    summary = summarize(sources.load(name, verify=verify))
    return f'{name} is embedded in scikit-learn; nothing to prepare.\n{summary}'
  if data_dir is None:
    raise ValueError('--data_dir is missing: a folder for prepared data sets.')
  if importlib.util.find_spec('tensorflow_datasets') is None:
    raise ModuleNotFoundError(
        'Preparing needs tensorflow-datasets (`pip install tensorflow-datasets'
        ' array_record importlib_resources`).'
    )
  data_dir = pathlib.Path(data_dir).expanduser()
  raw_dir = data_dir if raw_dir is None else pathlib.Path(raw_dir).expanduser()
  folder, _ = tfds_source.find_prepared(data_dir, name)
  if folder is not None:
    done = f'{folder}: prepared already'
  else:
    _say(f'reading the raw files of {name} under {raw_dir} ...')
    try:
      data = sources.load_raw(name, raw_dir, verify=verify)
    except FileNotFoundError:
      if not allow_download:
        raise
      done = f'{download(name, data_dir, raw_dir)}: prepared by a stock builder'
    else:
      _say(f'writing and comparing {data_dir / name} ...')
      splits = raw_formats.Splits(*data[1:5])
      done = f'{tfds_source.write_prepared(splits, name, data_dir)}: prepared'
  data = sources.load(name, data_dir, verify=verify)
  checked = 'verified' if verify else 'not verified against the official data'
  return f'{done}; read back, {checked}.\n{summarize(data)}'


def parse_flags(argv) -> list[str]:
  """absl's flags parser with one line per error."""
  try:
    return terminal.read_flags(argv)
  except terminal.CommandError as e:
    fail(str(e))


def main(argv) -> None:
  """Prepares a data set; prints errors on one line and exits with status 2."""
  logging.set_verbosity(logging.WARNING)  # tfds logs every file it opens.
  if len(argv) > 1:
    fail(f'Unexpected argument {argv[1]!r}; all arguments are --flags.')
  if _LIST.value:
    print(list_datasets())
    return
  if _DATASET.value is None:
    fail(f'--dataset is missing; one of {", ".join(sources.DATASETS)}.')
  try:
    data_dir, raw_dir = _DATA_DIR.value, _RAW_DIR.value
    if data_dir:
      data_dir = terminal.folder('--data_dir', data_dir)
    if raw_dir:  # It is only read.
      raw_dir = terminal.expanded(raw_dir, '--raw_dir')
    print(
        prepare(
            _DATASET.value,
            data_dir,
            raw_dir,
            verify=_VERIFY.value,
            allow_download=_DOWNLOAD.value,
        )
    )
  except (ValueError, OSError, ImportError) as e:
    fail(line(e).replace('pass verify=False', 'pass --noverify'))


def _say(message: str) -> None:
  line = ' '.join(message.split())
  print(f'prepare_data: {line}', file=sys.stderr, flush=True)


def run() -> None:
  """Runs the program."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # Only errors.
  terminal.run(main, parse_flags, __doc__)


if __name__ == '__main__':
  run()
