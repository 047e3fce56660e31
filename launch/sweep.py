"""Runs the cells of a results table, and renders it.

  python -m launch.sweep --table=configs/tables/fashion_mnist.py \
      --data_dir=DIR --out=results/fashion_mnist

A table is a Python file with a function `get_table()`. Cells that have a
result under `out` are not run again; one that was interrupted goes on. Without
`data_dir` the data must not need one; `--render` only renders what is there.
"""

from collections.abc import Sequence
import importlib.util
import pathlib
import sys

from absl import app, flags

from launch.terminal import fail, parse_flags

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_string(
      'table', 'configs/tables/fashion_mnist.py', 'File of the table.'
  )
  flags.DEFINE_string('out', None, 'Folder of the results.')
  flags.DEFINE_string(
      'workdirs', None, 'Folder of the runs; runs/<table> by default.'
  )
  flags.DEFINE_string('data_dir', None, 'Folder of the data set.')
  flags.DEFINE_list('seeds', None, "Seeds, instead of the table's.")
  flags.DEFINE_list('rows', None, 'Labels of rows, instead of all.')
  flags.DEFINE_bool('render', False, 'Render what is there; run nothing.')


def load_table(name: str):
  """The table that a Python file describes."""
  paths = [pathlib.Path(name), _ROOT / name]
  path = next((path for path in paths if path.is_file()), None)
  if path is None:
    known = sorted((_ROOT / 'configs' / 'tables').glob('*.py'))
    names = ', '.join(f'configs/tables/{p.name}' for p in known)
    raise FileNotFoundError(f'No table file {name!r}; there are {names}.')
  if str(_ROOT) not in sys.path:
    sys.path.append(str(_ROOT))
  spec = importlib.util.spec_from_file_location('table_file', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_table()


def choose(table, seeds, rows):
  """The part of a table that the flags name."""
  if seeds is not None:
    try:
      table = table._replace(seeds=tuple(map(int, seeds)))
    except ValueError:
      raise ValueError(f'seeds must be integers, got {seeds}.') from None
  if rows is not None:
    unknown = [row for row in rows if row not in table.rows]
    if unknown:
      raise ValueError(
          f'Unknown row {unknown[0]!r}; known are {", ".join(table.rows)}.'
      )
    table = table._replace(rows={row: table.rows[row] for row in rows})
  return table


def main(argv: Sequence[str]) -> None:
  """Runs and renders the table that the flags describe."""
  del argv
  from fedjax_het.experiment import sweep

  options = flags.FLAGS
  name = pathlib.Path(options.table).stem
  out = pathlib.Path(options.out or f'results/{name}')
  workdirs = pathlib.Path(options.workdirs or f'runs/{name}')
  try:
    table = choose(load_table(options.table), options.seeds, options.rows)
    if options.render:
      cells = sweep.read_cells(table, out)
    else:
      overrides = {'data_dir': options.data_dir} if options.data_dir else {}
      cells = sweep.run_cells(
          table, out, workdirs, overrides=overrides,
          announce=lambda line: print(line, flush=True),
      )  # fmt: skip
    print(sweep.render(table, cells, out))
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(e)
  except (FloatingPointError, OSError) as e:
    fail(e, 1)
  except KeyboardInterrupt:
    fail('Interrupted; the same command goes on where it was.', 130)
  print(f'\nTable: {out / "table.md"}')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=parse_flags)
