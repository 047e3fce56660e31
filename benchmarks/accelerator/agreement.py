"""Whether two runs of one config agree up to rounding."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Largest allowed |a - b| / max(1, |a|) of two metrics a and b from runs of two
# rounds on two devices. `map` and `vmap` on one CPU, which round differently,
# differ by up to 0.009, which is three test examples.
TOLERANCE = 0.03


class Agreement(NamedTuple):
  """The comparison of two runs.

  Attributes:
    agrees: Whether nothing differs by more than `TOLERANCE`.
    difference: The largest difference of two metrics.
    where: The metric with that difference, or one that is not in both runs.
  """

  agrees: bool
  difference: float
  where: str


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
  """Yields (name, number) of all numbers in a JSON value."""
  if isinstance(value, Mapping):
    parts = value.items()
  elif isinstance(value, Sequence) and not isinstance(value, str):
    parts = enumerate(value)
  else:
    yield name, value
    return
  for key, part in parts:
    yield from _flat(part, f'{name}/{key}')


def _numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """{'split round/metric': number}, without wall times."""
  return {
      name: value
      for row in rows
      for key, part in row.items()
      if key not in ('split', 'round', 'seconds')
      for name, value in _flat(part, f'{row["split"]} {row["round"]}/{key}')
  }


def compare(
    rows: Sequence[Mapping[str, Any]], want: Sequence[Mapping[str, Any]]
) -> Agreement:
  """Compares two runs of one config, line by line.

  Counts, such as bytes and clients, must be equal; other numbers may differ by
  rounding.

  Args:
    rows: Lines of metrics.jsonl.
    want: Lines of the reference.

  Returns:
    The comparison.
  """
  here, there = _numbers(rows), _numbers(want)
  if odd := sorted(here.keys() ^ there.keys()):
    return Agreement(False, float('inf'), f'{odd[0]} is not in both')
  largest, where = 0.0, ''
  for name, a in there.items():
    b = here[name]
    if isinstance(a, float) and isinstance(b, (int, float)):
      difference = abs(a - b) / max(1.0, abs(a))
    else:  # A count, a text or null.
      difference = 0.0 if a == b else float('inf')
    if difference > largest:
      largest, where = difference, name
  return Agreement(largest <= TOLERANCE, largest, where)
