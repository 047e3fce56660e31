"""A run as text, as HTML for notebooks, and as columns."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from fedjax_het.reporting import tables
from fedjax_het.reporting.run_files import Row
from fedjax_het.reporting.summary import Summary


def as_text(title: str, summary: Summary, facts: Mapping[str, Any]) -> str:
  """A title, the table of accuracies, and a few totals.

  Args:
    title: Its first line.
    summary: The run's summary.
    facts: The run's facts.

  Returns:
    Some lines of text.
  """
  if summary.last is None:
    return title
  table = tables.as_text(tables.results(summary, facts))
  return '\n'.join([title, table, *tables.totals(summary, None)])


def as_html(title: str, summary: Summary, facts: Mapping[str, Any]) -> str:
  """`as_text` as HTML, for notebooks."""
  title = f'<b>{html.escape(title)}</b>'
  if summary.last is None:
    return title
  table = tables.as_html(tables.results(summary, facts))
  lines = (html.escape(line) for line in tables.totals(summary, None))
  return f'{title}{table}{"<br>".join(lines)}'


def columns(rows: Sequence[Row], split: str) -> dict[str, list[Any]]:
  """The lines of one split as columns, such as for `pandas.DataFrame`.

  Args:
    rows: The lines of metrics.jsonl.
    split: Such as 'test' or 'train'.

  Returns:
    {name: one value per line}; a value is None if a line lacks it or it is not
    finite. Lists, such as the accuracy of each model, are left out; metrics of
    the server are called `server/<name>`.
  """
  chosen = [
      {**row, **{f'server/{k}': v for k, v in row.get('server', {}).items()}}
      for row in rows
      if row['split'] == split
  ]
  names = dict.fromkeys(
      name
      for row in chosen
      for name, value in row.items()
      if not isinstance(value, list | dict | str)
  )
  return {name: [row.get(name) for row in chosen] for name in names}
