r"""Runs the cells of a results table, and renders it.

  python -m launch.sweep --table=fedin_v2_table1 --scale=quick
  python -m launch.sweep --table=fedin_v2_table1 --data_dir=DIR \
      --rows=FedAvg,FedIN --cols=cifar10_iid,cifar10_non_iid --seeds=3

A table is a file of configs/tables, by name or by path. A cell is a run of a
row (a method) in a column (data and split, if the table has columns) with one
seed, at one of the table's scales: 'full' is the paper's own setting; 'cpu' is
narrower and shorter; 'quick' is two rounds of tiny nets on the embedded digits,
which need no files. Results are in results/<table>/<scale>, one JSON file per
cell, or in results/<table> if a table has a single scale.

Cells that have a result are not run again, and an interrupted cell is resumed.
If the same command runs twice at the same time, the two share the work.
`--seeds=3` means the seeds 0, 1 and 2, `--seeds=0,4` means 0 and 4, and
`--seeds=5,` means only 5. The first words of several columns or rows mean all
of them: `--cols=cifar10` is cifar10_iid and cifar10_non_iid. `--render`, or
`python -m launch.report --table=...`, only renders stored cells.
`--reuse=results/fedin_v2_table1` first copies the results that another table
has of the same configs and seeds. `--costs` adds the peak memory and operations
of a client to stored cells that lack them, and renders; it trains nothing.
`--dry_run` lists the cells with their states and estimated times, and changes
nothing. Results that git tracks are changed only if --out names their folder.

A search over entries of a config is also a table, with a row for each point.

  python -m launch.sweep --config=configs/fedin.py:quick \
      --grid='local.learning_rate=1e-3,1e-2; algorithm.mu=0,0.1' --seeds=3
  python -m launch.sweep --config=configs/fedin.py:quick \
      --grid='local.learning_rate=1e-4..1e-1' --samples=8

With a table, each row is searched over the same points, which are the columns.

  python -m launch.sweep --table=digits --grid='local.learning_rate=1e-3,3e-3'
"""

from collections.abc import Sequence
import pathlib
import re
import sys

from absl import flags

from . import config_flag, grid, stopping, table_files, terminal
from .terminal import CommandError, expanded, fail


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_string(
      'table', 'fashion_mnist', 'Name of a table, or path of its file.'
  )
  flags.DEFINE_string(
      'scale', None, "full, cpu or quick; the table's first by default."
  )
  flags.DEFINE_string(
      'out', None,
      'Folder of the results; results/<table> by default. If a table has '
      'several scales, they are in OUT/<scale>.',
  )  # fmt: skip
  flags.DEFINE_string(
      'workdirs', None, 'Folder of the runs; runs/<table> by default.'
  )
  flags.DEFINE_string('data_dir', None, 'Folder of the data sets.')
  flags.DEFINE_string(
      'seeds', None, "A count, or seeds with commas; the table's by default."
  )
  flags.DEFINE_list('rows', None, 'Rows, instead of all.')
  flags.DEFINE_list('cols', None, 'Columns, instead of all.')
  flags.DEFINE_list(
      'reuse', [], "Folders of other tables' results; equal cells are copied."
  )
  flags.DEFINE_bool('render', False, 'Render what is there; run nothing.')
  flags.DEFINE_bool(
      'costs', False,
      "Add the clients' memory and operations to cells without; run nothing.",
  )  # fmt: skip
  flags.DEFINE_bool(
      'dry_run', False,
      'List the cells, their states and estimated times; run nothing.',
  )  # fmt: skip
  flags.DEFINE_list(
      'formats', [], 'Besides Markdown and PNG: csv, tex, pdf, svg.'
  )
  flags.DEFINE_string(
      'grid', None,
      'KEY=VALUE,VALUE; KEY=LOW..HIGH of --config, or of each row of --table.',
  )  # fmt: skip
  flags.DEFINE_integer('samples', None, 'Points of the grid that are drawn.')
  flags.DEFINE_integer('samples_seed', 0, 'Seed of that draw.')
  config_flag.define()


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error; it loads a grid's config."""
  try:
    argv = terminal.with_flagfiles(argv)
    searching = any(re.match('--?grid(=|$)', arg) for arg in argv)
    of_table = any(re.match('--?table(=|$)', arg) for arg in argv)
    of_config = any(re.match(r'--?(no)?config([.=]|$)', arg) for arg in argv)
    if of_config and not searching:
      raise CommandError('--config is for a search; name its --grid, too.')
    if of_config and of_table:
      raise CommandError('Either --table or --config.')
    if searching and not of_table:
      argv = config_flag.with_config(argv)
      for note in config_flag.check(argv):
        print(f'Note: {note}', file=sys.stderr)
    sys.argv = argv  # The config flag reads its overrides from there.
    rest = terminal.read_expanded(argv)
    if len(rest) > 1:
      raise CommandError(
          f'Unexpected argument {rest[1]!r}; options look like --out=DIR.'
      )
    options = flags.FLAGS
    if searching and not of_table and options.scale is not None:
      raise CommandError('--scale belongs to a results table: --table=NAME.')
    if options.render + options.costs + options.dry_run > 1:
      raise CommandError('Only one of --render, --costs and --dry_run.')
    if options.render:
      # With --grid the rows are a part of what the table is.
      for name in ('rows',) * (not searching) + ('cols', 'seeds'):
        if options[name].value is not None:
          raise CommandError(
              f'--render draws the whole table, so leave out --{name}.'
          )
    if options.samples is not None and not searching:
      raise CommandError('--samples needs --grid.')
    return rest
  except CommandError as e:
    fail(e)


def _find():
  """The table that the flags name."""
  options = flags.FLAGS
  search = options.grid, options.samples, options.samples_seed
  if options.grid is not None and not options['table'].present:
    return grid.find(options.config, *search)
  found = table_files.find_table(options.table, options.scale)
  if options.grid is None:
    return found
  return grid.of_table(found, *search, rows=options.rows)


def _existing(name: str) -> pathlib.Path:
  """The folder of a value of --reuse."""
  path = terminal.expanded(name, '--reuse')
  if not path.is_dir():
    raise CommandError(f'--reuse={name}: there is no such folder.')
  return path


def main(argv: Sequence[str]) -> None:
  """Runs and renders the table that the flags describe."""
  del argv
  from fedjax_het.experiment import (
    Progress,
    costs,
    sweep,
    sweep_preview,
  )
  from fedjax_het.reporting import tables

  options = flags.FLAGS
  failure = None

  def announce(text: str) -> None:
    stopping.raise_if_it_came()
    print(text, flush=True)

  try:
    tables.check_formats(options.formats)
    found = _find()
    if options.dry_run:
      out = table_files.flag_folder(found, '--out', options.out, 'results')
    else:
      out = table_files.results_folder(found, options.out)
    workdirs = table_files.flag_folder(
        found, '--workdirs', options.workdirs, 'runs'
    )
    part = table_files.choose(
        found.table, options.seeds, options.rows, options.cols, found.merged
    )
    overrides = {}
    if options.data_dir is not None:
      overrides['data_dir'] = str(expanded(options.data_dir, '--data_dir'))
    folders = [_existing(name) for name in options.reuse]
    if options.dry_run:
      announce('A local step of each setting is timed ...')
      for text in sweep_preview.lines(
          part, out, workdirs, overrides=overrides, reuse=folders
      ):
        announce(text)
      return
    sweep.copy_cells(part, out, folders, announce=announce)
    if options.costs:
      costs.add_costs(
          part, out, overrides=overrides, announce=announce
      )
    elif not options.render:
      try:
        sweep.run_cells(
            part, out, workdirs,
            overrides=overrides,
            announce=announce,
            progress=Progress,
        )  # fmt: skip
      except FloatingPointError as e:
        failure = e
      print()
    # Renders the whole table, even if only a part was run now.
    table_files.show(found, out, options.formats)
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(failure or e, 2 if failure is None else 1)
  except OSError as e:
    fail(e, 1)
  except KeyboardInterrupt:
    fail('Interrupted; the same command goes on where it was.', 130)
  if failure is not None:
    fail(failure, 1)


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, parse_flags, __doc__)


if __name__ == '__main__':
  run()
