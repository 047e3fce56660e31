"""Renews the report of a run, compares several, or renders a results table.

  python -m launch.report DIR
  python -m launch.report DIR DIR ... --out=DIR
  python -m launch.report --table=fedin_v2_table1 [--scale=quick]

For one workdir it writes report.md and pictures again. For several it prints a
table and writes it to `out` as comparison.md, with a picture of the curves; for
runs that differ in their seeds alone the table also has a line with mean and
deviation, and the picture one curve with a band. For a table of configs/tables
it writes table.md: the results of a sweep so far, beside the paper's
numbers, with curves; missing cells leave gaps. `--formats=csv,tex,pdf,svg` also
writes these formats.
"""

from collections.abc import Sequence

from absl import flags

from . import table_files, terminal
from .terminal import CommandError, expanded, fail, folder, read_flags


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_string(
      'out', None,
      'Folder for the comparison of several runs (comparison by default), or '
      'of the results of a table (results/<table> by default).',
  )  # fmt: skip
  flags.DEFINE_string(
      'table', None, 'Name of a results table, or path of its file.'
  )
  flags.DEFINE_string('scale', None, "The table's first scale by default.")
  flags.DEFINE_list(
      'formats', [], 'Besides Markdown and PNG: csv, tex, pdf, svg.'
  )


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error."""
  try:
    rest = read_flags(argv)
  except CommandError as e:
    fail(e)
  options = flags.FLAGS
  if options.table is None:
    if len(rest) < 2:
      fail(
          'Name one or more workdirs: python -m launch.report DIR [DIR ...], '
          'or a table: --table=NAME.'
      )
    if options.scale is not None:
      fail('--scale belongs to a results table: --table=NAME.')
  elif len(rest) > 1:
    fail(f'Either a table or workdirs, got --table and {rest[1]!r}.')
  return rest


def _report_table(
    name: str, scale: str | None, out: str | None, formats: Sequence[str]
) -> None:
  """Renders the available cells of a results table."""
  found = table_files.find_table(name, scale)
  table_files.show(found, table_files.results_folder(found, out), formats)


def main(argv: Sequence[str]) -> None:
  """Writes the report, the comparison or the table."""
  from fedjax_het import experiment
  from fedjax_het.reporting import tables

  options = flags.FLAGS
  try:
    tables.check_formats(options.formats)
    folders = [expanded(arg, 'DIR') for arg in argv[1:]]
    if options.table is not None:
      _report_table(
          options.table, options.scale, options.out, options.formats
      )
    elif len(folders) == 1:
      if options.formats:
        raise ValueError('--formats is for several runs, or for a table.')
      if options.out is not None:
        raise ValueError(
            '--out is for several runs, or for a table; the report of one run '
            'is written into its folder.'
        )
      print(f'Report: {experiment.write_report(folders[0])}')
    else:
      out = folder('--out', options.out or 'comparison')
      print(experiment.write_comparison(folders, out, options.formats))
      print(f'\nComparison: {out / "comparison.md"}')
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(e)
  except OSError as e:
    fail(e, 1)


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, parse_flags, __doc__)


if __name__ == '__main__':
  run()
