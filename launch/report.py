"""Renews the report of a run, or compares several.

  python -m launch.report DIR
  python -m launch.report DIR DIR ... --out=DIR

One workdir: its report.md and pictures are written anew. Several: a table is
printed, and written to `out` as comparison.md with a picture of the curves.
"""

from collections.abc import Sequence
import pathlib

from absl import app, flags

from launch.terminal import fail

_OUT = flags.DEFINE_string(
    'out', 'comparison', 'Folder for the comparison of several runs.'
)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error."""
  try:
    rest = flags.FLAGS(list(argv))
  except flags.Error as e:
    fail(e)
  if len(rest) < 2:
    fail('Name one or more workdirs: python -m launch.report DIR [DIR ...].')
  return rest


def main(argv: Sequence[str]) -> None:
  """Writes the report or the comparison."""
  from fedjax_het import experiment

  folders = [pathlib.Path(arg) for arg in argv[1:]]
  try:
    if len(folders) == 1:
      print(f'Report: {experiment.write_report(folders[0])}')
      return
    out = pathlib.Path(_OUT.value)
    print(experiment.write_comparison(folders, out))
    print(f'\nComparison: {out / "comparison.md"}')
  except (ValueError, OSError) as e:
    fail(e)


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
