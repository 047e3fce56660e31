"""Many inputs one after another, reproducible from a seed, with totals."""

import collections

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.worker import Worker


def run(strategy, number: int, function: str, seconds: float, first_seed=0):
  """Tries inputs in a process of their own.

  Args:
    strategy: Draws tuples, the arguments of the function.
    number: Of inputs.
    function: `module:name`, called there.
    seconds: After which an input hangs.
    first_seed: The inputs follow from it.

  Returns:
    The totals by kind of outcome, and the inputs that were neither done nor
    refused in one line, each with its outcome.
  """
  totals, wrong, worker = collections.Counter(), [], Worker()

  @seed(first_seed)
  @settings(
      max_examples=number,
      deadline=None,
      database=None,
      phases=[Phase.generate],
      suppress_health_check=list(HealthCheck),
  )
  @given(strategy)
  def trial(arguments):
    outcome = worker(function, *arguments, seconds=seconds)
    totals[outcome.kind] += 1
    if outcome.kind not in ('done', 'refused'):
      wrong.append((arguments, outcome))

  try:
    trial()
  finally:
    worker.close()
  print(f'{function}, {sum(totals.values())} inputs: {dict(totals)}')
  return totals, wrong
