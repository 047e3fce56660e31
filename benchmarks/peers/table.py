"""Tables of the results of `benchmarks.peers`."""

from collections.abc import Mapping
import re
from typing import Any

from benchmarks import common
from benchmarks.peers import environments, rows

Rows = Mapping[tuple[str, str], Mapping[str, Any]]


def _title(program: str, row: Mapping[str, Any]) -> str:
  """A program's name in a table, with the version of a peer."""
  if program in environments.REQUIREMENTS:
    package = re.match(r'[\w-]+', environments.REQUIREMENTS[program][0])[0]
    versions = row.get('versions', {})
    return f'{package} {versions.get(package, "")}'.strip()
  names = {
      rows.DEFAULT: 'ours by default',
      rows.TUNED: 'ours, tuned',
      rows.YARDSTICK: 'eager PyTorch',
  }
  return names.get(program, f'ours, {program}')


def _speed(found: Rows, work: str, program: str) -> float | None:
  return found.get((work, program), {}).get('images_per_second')


def _ratio(speed: float | None, yardstick: float | None) -> str:
  if speed is None:
    return '-'
  if yardstick is None:
    return f'{speed:,.0f}'
  return f'{speed:,.0f} ({speed / yardstick:.2f})'


def details(found: Rows) -> str:
  """A Markdown table with a line per row."""
  header = [
      'work', 'program', 'images/s', 's a round', ': eager PyTorch',
      'first round, s', 'of that XLA', 'first round, warm cache, s',
      'of that XLA', 'peak MB', 'rounds',
  ]  # fmt: skip
  lines = []
  for (work, program), row in found.items():
    name = _title(program, row)
    if row.get('error'):
      lines.append([work, name, row['error'], *['-'] * (len(header) - 3)])
      continue
    eager = _speed(found, work, rows.YARDSTICK)
    speed = row['images_per_second']
    cells = [
        speed,
        row['seconds_per_round'],
        speed / eager if speed and eager else None,
        row['first_round'],
        row.get('xla_seconds'),
        row.get('first_round_warm'),
        row.get('xla_seconds_warm'),
        row['peak_megabytes'],
        len(row['round_seconds']) - 1,
    ]
    lines.append([work, name, *('-' if c is None else c for c in cells)])
  return common.markdown(header, lines)


def summary(found: Rows, platform: str) -> str:
  """A Markdown table with a line per work: baseline, peers and the library.

  Ratios are to the fastest peer, or to eager PyTorch if no peer ran.
  """
  peers = [n for n, p in rows.programs(platform).items() if p.peer]
  header = [
      'work', 'eager PyTorch', *peers, 'ours by default', 'ours, tuned',
      'ours by hand',
      'form by hand', 'first round, empty / warm cache, s',
  ]  # fmt: skip
  lines = []
  for work in dict.fromkeys(work for work, _ in found):
    speeds = {n: _speed(found, work, n) for n in (rows.YARDSTICK, *peers)}
    ran = [speeds[n] for n in peers if speeds[n]]
    base = max(ran) if ran else speeds[rows.YARDSTICK]
    by_hand = {
        n: s for n in rows.by_hand(platform) if (s := _speed(found, work, n))
    }
    best = max(by_hand, key=by_hand.get, default=None)
    default = found.get((work, rows.DEFAULT), {})
    first = [default.get('first_round'), default.get('first_round_warm')]
    lines.append([
        work,
        *(_ratio(s, None) for s in speeds.values()),
        _ratio(_speed(found, work, rows.DEFAULT), base),
        _ratio(_speed(found, work, rows.TUNED), base),
        _ratio(by_hand.get(best), base),
        best or '-',
        ' / '.join('-' if s is None else f'{s:.1f}' for s in first),
    ])
  return common.markdown(header, lines)


def report(found: Rows, platform: str, most_epochs: int | None = None) -> str:
  """Both tables, in Markdown.

  Args:
    found: {(work, program): row}.
    platform: 'cpu', 'gpu' or 'tpu'.
    most_epochs: The limit of local epochs; None for none.

  Returns:
    The text.
  """
  limited = f' At most {most_epochs} local epochs.' if most_epochs else ''
  return (
      'Images per second; in parentheses relative to the fastest peer, or to '
      f'eager PyTorch where no peer ran.{limited}\n\n'
      f'{summary(found, platform)}\n\n{details(found)}\n'
  )
