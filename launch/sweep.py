r"""Runs the cells of a results table, and renders it.

  python -m launch.sweep --table=fedin_v2_table1 --scale=quick
  python -m launch.sweep --table=fedin_v2_table1 --data_dir=DIR \
      --rows=FedAvg,FedIN --cols=cifar10_iid,cifar10_non_iid --seeds=3

A table is a file of configs/tables, by name or by path. Its cells are runs of
a row (a method) in a column (data and split, where a table has columns) with a
seed, at one of its scales: 'full', the paper's own setting; 'cpu', narrowed and
shortened; 'quick', two rounds of tiny nets on the embedded digits, which need
no data. Results lie in results/<table>/<scale>, a JSON file a cell; of tables
of one scale alone, in results/<table>.

Cells that have a result are not run again; one that was interrupted goes on.
The same command, given twice at a time, shares the work. `--seeds=3` are the
seeds 0, 1 and 2, `--seeds=0,4` those two, `--seeds=5,` 5 alone. `--render`, or
`python -m launch.report --table=...`, only renders what is there.
"""

from collections.abc import Sequence

from absl import flags

from . import table_files, terminal
from .terminal import fail, folder, parse_flags


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_string(
      'table', 'fashion_mnist', 'Name of a table, or path of its file.'
  )
  flags.DEFINE_string(
      'scale', None, "full, cpu or quick; the table's first by default."
  )
  flags.DEFINE_string(
      'out', None, 'Folder of the results; results/<table> by default.'
  )
  flags.DEFINE_string(
      'workdirs', None, 'Folder of the runs; runs/<table> by default.'
  )
  flags.DEFINE_string('data_dir', None, 'Folder of the data sets.')
  flags.DEFINE_string(
      'seeds', None, "A count, or seeds with commas; the table's by default."
  )
  flags.DEFINE_list('rows', None, 'Rows, instead of all.')
  flags.DEFINE_list('cols', None, 'Columns, instead of all.')
  flags.DEFINE_bool('render', False, 'Render what is there; run nothing.')


def main(argv: Sequence[str]) -> None:
  """Runs and renders the table that the flags describe."""
  del argv
  from fedjax_het.experiment import Progress, sweep, sweep_table
  from fedjax_het.reporting import sweep_report

  options = flags.FLAGS
  failure = None
  try:
    found = table_files.find_table(options.table, options.scale)
    out = folder('--out', str(found.folder(options.out, 'results')))
    workdirs = folder(
        '--workdirs', str(found.folder(options.workdirs, 'runs'))
    )
    part = table_files.choose(
        found.table, options.seeds, options.rows, options.cols
    )
    if not options.render:
      overrides = {}
      if options.data_dir is not None:
        overrides['data_dir'] = str(folder('--data_dir', options.data_dir))
      try:
        sweep.run_cells(
            part, out, workdirs,
            overrides=overrides,
            announce=lambda text: print(text, flush=True),
            progress=Progress,
        )  # fmt: skip
      except FloatingPointError as e:
        failure = e
      print()
    # The whole table, whatever part of it was run now.
    cells = sweep_table.read_cells(found.table, out)
    markdown = sweep_report.render(found.table, cells, out)
    print(f'{found.heading}\n\n{markdown}')
    print(f'\nTable: {out / "table.md"}')
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
