"""Tests the trained models of a run again.

  python -m launch.evaluate --workdir=runs/quick
  python -m launch.evaluate --workdir=runs/quick --personal_test

It prints the results on the whole test set and, with --personal_test, those of
each client's model on test examples in the proportions of its own classes. The
models are those of the last checkpoint, or of the best evaluation with --best.
The workdir is not changed. --data_dir or --data_file says where the data set is
now, if it has moved. If the run's config file registers something, such as a
partition, name that file by --config.
"""

from collections.abc import Sequence

from absl import flags

from . import stored_runs, terminal
from .terminal import fail


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  stored_runs.define_flags_of_one()
  flags.DEFINE_bool(
      'personal_test', None,
      "Whether clients are tested on examples of their own; the run's choice.",
  )  # fmt: skip
  flags.DEFINE_integer(
      'eval_batch_size', None,
      "Examples of a test batch; the run's number. Results depend on it only "
      'where norms take the statistics of a test batch.',
  )  # fmt: skip
  flags.DEFINE_integer(
      'eval_clients_per_group', None,
      'Clients tested of each group with models of its own; 0 for all; the '
      "run's number.",
  )  # fmt: skip


def main(argv: Sequence[str]) -> None:
  """Evaluates what the flags describe; prints errors on one line."""
  del argv
  options = flags.FLAGS
  if options.workdir is None:
    fail('--workdir is missing; see --help.')
  from fedjax_het.reporting import tables
  from fedjax_het.reporting.summary import main_metric, summarise

  entries = {
      name: options[name].value
      for name in ('personal_test', 'eval_batch_size')
      if options[name].value is not None
  }
  if (clients := options.eval_clients_per_group) is not None:
    if clients < 0:
      fail(f'--eval_clients_per_group must be at least 0, got {clients}.')
    entries['eval_clients_per_group'] = clients or None
  stored_runs.hide_warnings_of_configs()
  try:
    run = stored_runs.open_one()
    row = run.evaluate(**entries)
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(e)
  except OSError as e:
    fail(e, 1)
  metric = main_metric(run.facts)
  rounds = f'{row["round"]} of {run.config.num_rounds} rounds'
  print(f'{run.workdir} after {rounds}, {metric.name}:\n')
  print(tables.as_text(tables.evaluation(row, run.facts, metric)))
  if own := tables.personal(summarise([row], None, metric), run.facts):
    print('\nEach client on its own test examples:\n')
    print(tables.as_text(own))


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, terminal.parse_flags, __doc__)


if __name__ == '__main__':
  run()
