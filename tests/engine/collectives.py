"""Where the collectives of a compiled program are."""

import re

_NAMES = 'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter'


def computations(compiled) -> set[str]:
  """Names of XLA's computations, such as bodies of loops, with collectives.

  CPU devices run the collectives of one computation in one order. Those of a
  loop and those around it may be run in another order on each device.

  Args:
    compiled: A compiled program.

  Returns:
    The names.
  """
  found, name = set(), ''
  for line in compiled.as_text().splitlines():
    if start := re.match(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      name = start[1]
    elif re.search(rf' = .*\b(?:{_NAMES})(?:-start)?\(', line):
      found.add(name)
  return found
