"""Tables and numbers as text, for terminals, Markdown, LaTeX and CSV."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import html
import io
from typing import Any

import numpy as np

from fedjax_het.engine.task import ACCURACY, Metric
from fedjax_het.names import check_name
from fedjax_het.reporting.summary import Summary, views_of

Table = list[list[str]]  # The first row is the header.
# Formats of tables and pictures, besides Markdown and PNG.
FORMATS = ('csv', 'tex', 'pdf', 'svg')
_LATEX = {
    **{c: f'\\{c}' for c in '&%$#_{}'},
    '±': r'$\pm$', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
    '\\': r'\textbackslash{}',
}  # fmt: skip


def check_formats(formats: Iterable[str]) -> None:
  """Raises ValueError for a format that is not one of `FORMATS`."""
  for name in formats:
    check_name('format', name, FORMATS)


def as_text(table: Sequence[Sequence[str]]) -> str:
  """Aligned columns: the first is left-aligned, others right-aligned."""
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]

  def line(row):
    cells = [row[0].ljust(widths[0])]
    cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
    return '  '.join(cells).rstrip()

  header, *body = table
  rule = '  '.join('-' * w for w in widths)
  return '\n'.join([line(header), rule, *map(line, body)])


def as_markdown(table: Sequence[Sequence[str]]) -> str:
  """A Markdown table: first column left-aligned, others right-aligned."""
  header, *body = table
  rule = ['---', *['---:'] * (len(header) - 1)]
  rows = [header, rule, *body]
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def as_latex(table: Sequence[Sequence[str]]) -> str:
  """A LaTeX table (package booktabs) with a left-aligned first column."""

  def line(row):
    cells = (''.join(_LATEX.get(c, c) for c in cell) for cell in row)
    return ' & '.join(cells) + r' \\'

  header, *body = table
  return '\n'.join([
      rf'\begin{{tabular}}{{l{"r" * (len(header) - 1)}}}',
      r'\toprule', line(header), r'\midrule', *map(line, body),
      r'\bottomrule', r'\end{tabular}', '',
  ])  # fmt: skip


def as_csv(table: Sequence[Sequence[Any]]) -> str:
  """A table as comma-separated values; None is an empty cell."""
  text = io.StringIO()
  csv.writer(text, lineterminator='\n').writerows(table)
  return text.getvalue()


def as_html(table: Sequence[Sequence[str]]) -> str:
  """An HTML table: first column left-aligned, others right-aligned."""

  def line(row, tag):
    cells = (
        f'<{tag} style="text-align: {"left" if i == 0 else "right"}">'
        f'{html.escape(cell)}</{tag}>'
        for i, cell in enumerate(row)
    )
    return f'<tr>{"".join(cells)}</tr>'

  header, *body = table
  rows = ''.join(line(row, 'td') for row in body)
  return (
      f'<table><thead>{line(header, "th")}</thead><tbody>{rows}</tbody></table>'
  )


def percent(value: float | None) -> str:
  """Formats a fraction as a percentage: 0.9123 as 91.23 %."""
  return 'not finite' if value is None else f'{100 * value:.2f} %'


def amount(value: float | None, metric: Metric) -> str:
  """Formats a metric: a share in percent, any other with four digits."""
  return percent(value) if metric.percent else _number(value)


def spread(values: Sequence[float | None], metric: Metric = ACCURACY) -> str:
  """Formats mean and sample deviation (shares in percent); '-' for none."""
  if not len(values):
    return '-'
  if None in values:
    return 'not finite'
  scale, form = (100, '.1f') if metric.percent else (1, '.4g')
  numbers = scale * np.asarray(values)
  if len(numbers) == 1:
    return f'{numbers[0]:{form}}'
  return f'{numbers.mean():{form}} ± {numbers.std(ddof=1):{form}}'


def megabytes(num_bytes: float) -> str:
  """Formats bytes as MB of 10^6 bytes, with more digits for small numbers."""
  value = num_bytes / 1e6
  return f'{value:,.2f} MB' if value >= 0.1 or not value else f'{value:.5f} MB'


def seconds(value: float | None) -> str:
  """Formats a duration."""
  return '-' if value is None else f'{value:.3g} s'


def duration(value: float) -> str:
  """Formats seconds as two digits and a unit, such as '42 s' or '3.5 min'."""
  for size, unit in ((3600, 'h'), (60, 'min')):
    if value >= 1.5 * size:
      return f'{_two_digits(value / size)} {unit}'
  return f'{_two_digits(value)} s'


def _two_digits(value: float) -> str:
  return f'{float(f"{value:.1e}"):,g}'


def virtual(value: float | None) -> str:
  """Formats a time of the virtual clock."""
  return '-' if value is None else f'{value:,.1f} s of virtual time'


def results(summary: Summary, facts: Mapping[str, Any]) -> Table:
  """The metric of the last and best round, by group and as means.

  Args:
    summary: A run's summary, with at least one evaluation.
    facts: Its facts.

  Returns:
    The table.
  """
  last, best = summary.last, summary.best or summary.last
  main = summary.metric.name

  def shown(row, name):
    return amount(row[name], summary.metric)

  table = [[
      'group',
      'clients',
      'parameters',
      f'last round ({last["round"]})',
      'worst client',
      f'best round ({best["round"]})',
  ]]  # fmt: skip
  for name, group in facts['groups'].items():
    table.append([
        name,
        str(group['clients']),
        f'{group["parameters"]:,}',
        shown(last, f'{main}/{name}'),
        shown(last, f'{main}/{name}/worst'),
        shown(best, f'{main}/{name}'),
    ])
  clients = [group['clients'] for group in facts['groups'].values()]
  parameters = [group['parameters'] for group in facts['groups'].values()]
  table.append([
      'mean over groups',
      str(sum(clients)),
      f'{sum(parameters) // len(parameters):,}',
      shown(last, main),
      shown(last, f'{main}/worst'),
      shown(best, main),
  ])
  table.append([
      'mean over clients', '', '', shown(last, f'{main}/clients'), '',
      shown(best, f'{main}/clients'),
  ])  # fmt: skip
  return table


def evaluation(
    row: Mapping[str, Any], facts: Mapping[str, Any], metric: Metric
) -> Table:
  """One evaluation, by group and as means.

  Args:
    row: A test line of metrics.jsonl.
    facts: The run's facts.
    metric: The main metric of its task.

  Returns:
    The table.
  """
  main = metric.name
  table = [['group', 'clients', 'models', 'mean', 'worst', 'mean loss']]
  for name, group in facts['groups'].items():
    table.append([
        name,
        str(group['clients']),
        str(row[f'models/{name}']),
        amount(row[f'{main}/{name}'], metric),
        amount(row[f'{main}/{name}/worst'], metric),
        _number(row[f'loss/{name}']),
    ])
  clients = sum(group['clients'] for group in facts['groups'].values())
  table.append([
      'mean over groups',
      str(clients),
      '',
      amount(row[main], metric),
      amount(row[f'{main}/worst'], metric),
      _number(row['loss']),
  ])
  over_clients = amount(row[f'{main}/clients'], metric)
  table.append(['mean over clients', '', '', over_clients, '', ''])
  return table


def personal(summary: Summary, facts: Mapping[str, Any]) -> Table:
  """Clients on their own test examples: statistics of the last round.

  Args:
    summary: A run's summary, with at least one evaluation.
    facts: Its facts.

  Returns:
    The table, with all clients last; [] for a run without such tests.
  """
  last, metric = summary.last, summary.metric
  if f'personal/{metric.name}' not in last:
    return []
  table = [[
      'group', 'clients tested', 'mean', 'standard deviation', 'worst',
      f'{metric.tail}th percentile', 'mean over examples',
  ]]  # fmt: skip
  counts = {
      name: sum(v is not None for v in last[f'personal/clients/{name}'])
      for name in facts['groups']
  }
  rows = {name: (f'/{name}', count) for name, count in counts.items()}
  rows['all clients'] = '', sum(counts.values())
  for label, (suffix, count) in rows.items():
    numbers = [
        '-' if not count else amount(last[f'personal/{name}{suffix}'], metric)
        for name in (
            metric.name, 'std', 'worst', f'p{metric.tail}', 'pooled'
        )
    ]
    table.append([label, str(count), *numbers])
  return table


def personal_line(
    *rows: Mapping[str, Any] | None, metric: Metric = ACCURACY
) -> str:
  """Statistics over clients on their own test examples, or '-'.

  Args:
    *rows: The row of a run; of repetitions, a row of each. Of those it is the
      mean and the sample deviation.
    metric: The metric of the runs.

  Returns:
    The text.
  """
  if any(not r or r.get(f'personal/{metric.name}') is None for r in rows):
    return '-'

  def shown(name):
    values = [row[f'personal/{name}'] for row in rows]
    if len(values) == 1:
      return amount(values[0], metric)
    return spread(values, metric) + metric.percent * ' %'

  names = metric.name, 'std', 'worst', f'p{metric.tail}'
  mean, std, worst, tail = map(shown, names)
  return (
      f'mean {mean}, standard deviation {std}, worst {worst}, '
      f'{metric.tail}th percentile {tail}'
  )


def totals(summary: Summary, target: float | None) -> list[str]:
  """Lines on further models, bytes, time, the target and lost updates."""
  metric = summary.metric
  lines = [
      f'sent in {summary.rounds} rounds: {megabytes(summary.bytes_up)} up, '
      f'{megabytes(summary.bytes_down)} down',
      f'seconds per round: {seconds(summary.round_seconds)} (median, without '
      'compilation)',
  ]
  for view in reversed(views_of(summary.last or {})):
    value = amount(summary.last[f'views/{view}'], metric)
    lines.insert(
        0, f"view '{view}', last round: {value} (mean over clients)"
    )
  if summary.last and f'personal/{metric.name}' in summary.last:
    lines.insert(
        0,
        'clients on their own test examples, last round: '
        + personal_line(summary.last, metric=metric),
    )
  if summary.virtual_time is not None:
    lines.append(f'the whole run took {virtual(summary.virtual_time)}')
  if summary.lost:
    lines.append(
        f'visits lost on the way: {summary.lost} (their bytes are not counted)'
    )
  if target is not None:
    reached = 'not reached' if summary.reached is None else (
        f'reached in round {summary.reached}'
    )
    if summary.reached_time is not None:
      reached += f', after {virtual(summary.reached_time)}'
    lines.append(f'mean {metric.name} of {amount(target, metric)}: {reached}')
  if summary.dropped:
    lines.append(
        f'client updates left out because they were not finite: '
        f'{summary.dropped}'
    )
  return lines


def communication(rows, facts: Mapping[str, Any]) -> Table:
  """Bytes sent by group: the total, and the mean of a visit.

  Args:
    rows: The lines of metrics.jsonl.
    facts: The run's facts.

  Returns:
    The table, with the sum over groups last.
  """
  train = [row for row in rows if row['split'] in ('train', 'warm_up')]
  table = [[
      'group',
      'visits',
      'up, client and round',
      'down, client and round',
      'up, all rounds',
      'down, all rounds',
  ]]  # fmt: skip
  for label in (*facts['groups'], 'all'):
    suffix = '' if label == 'all' else f'/{label}'
    visits, up, down = (
        sum(row[name + suffix] for row in train)
        for name in ('clients', 'bytes_up', 'bytes_down')
    )
    each = [f'{b / visits:,.0f}' if visits else '-' for b in (up, down)]
    numbers = [f'{visits:,}', *each, f'{up:,}', f'{down:,}']
    table.append([label, *numbers])
  return table


def server(rows) -> Table:
  """The metrics of the server's turn, in its first and last round.

  Args:
    rows: The lines of metrics.jsonl.

  Returns:
    The table, with '-' for what a round did not measure; [] if no round has
    any.
  """
  train = [row for row in rows if row.get('server')]
  if not train:
    return []
  ends = train[0], train[-1]
  names = dict.fromkeys(name for row in ends for name in row['server'])

  def shown(value):
    return '-' if value is None else _number(value)

  header = ['metric', *(f'round {row["round"]}' for row in ends)]
  return [header] + [
      [name, *(shown(row['server'].get(name)) for row in ends)]
      for name in names
  ]


def _number(value: float | None) -> str:
  return 'not finite' if value is None else f'{value:.4g}'


def memory(facts: Mapping[str, Any]) -> Table:
  """Parameters and megabytes of state, by group and for the server."""
  table = [[
      'group',
      'parameters',
      'norm statistics',
      'model',
      'kept by a client between visits',
      'kept by all its clients',
  ]]  # fmt: skip
  for name, group in facts['groups'].items():
    numbers = group['parameters'] + group['statistics']
    table.append([
        name,
        f'{group["parameters"]:,}',
        f'{group["statistics"]:,}',
        megabytes(4 * numbers),
        megabytes(group['client_bytes']),
        megabytes(group['client_bytes'] * group['clients']),
    ])
  return [*table, ['server', '', '', '', '', megabytes(facts['server_bytes'])]]


def schedules(facts: Mapping[str, Any]) -> Table:
  """Budget and both estimates of each stage of FeDepth, in MB of 2^20 bytes."""
  table = [['group', 'budget', 'stage', 'paper', 'compiler']]
  for name, schedule in facts['schedules'].items():
    budget = schedule['budget']
    for number, stage in enumerate(schedule['stages'], 1):
      first, last = stage['blocks'][0], stage['blocks'][-1]
      blocks = first if first == last else f'{first} to {last}'
      together = f', {schedule["models"]} models' * (schedule['models'] > 1)
      table.append([
          name if number == 1 else '',
          '' if number > 1 else '-' if budget is None else f'{budget:.2f}',
          f'{number}: {blocks}{together}',
          f'{stage["paper"]:.2f}',
          f'{stage["measured"]:.2f}',
      ])
  return table
