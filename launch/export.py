"""Writes the trained models of a run to files, for other programs.

  python -m launch.export --workdir=runs/quick --out=models
  python -m launch.export --workdir=runs/quick --out=models --format=orbax

It writes a file, or an orbax checkpoint, for each group whose clients share a
model, and for each client that has its own model. The models are those of the
last checkpoint, or of the best evaluation with --best. The workdir is not
changed. Building the models reads the data set; --data_dir or --data_file says
where it is now, if it has moved. If the run's config file registers something,
such as a partition, name that file by --config.
"""

from collections.abc import Sequence

from absl import flags

from . import stored_runs, terminal
from .terminal import fail, folder


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  stored_runs.define_flags_of_one()
  flags.DEFINE_string('out', None, 'Folder for the models; made if missing.')
  flags.DEFINE_string('format', 'msgpack', 'msgpack (of flax) or orbax.')


def main(argv: Sequence[str]) -> None:
  """Exports what the flags describe; prints errors on one line."""
  del argv
  options = flags.FLAGS
  for name in ('workdir', 'out'):
    if options[name].value is None:
      fail(f'--{name} is missing; see --help.')
  try:
    out = folder('--out', options.out)
    run = stored_runs.open_one()
    written = run.export(out, format=options.format)
  except (
      ValueError, FileNotFoundError, FileExistsError, ImportError
  ) as e:  # fmt: skip
    fail(e)
  except OSError as e:
    fail(e, 1)
  print(f'Models after {run.rounds} rounds:')
  for path in written:
    print(f'  {path}')


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, terminal.parse_flags, __doc__)


if __name__ == '__main__':
  run()
