"""Tries many inputs, reproducible from a seed, and counts the outcomes."""

import collections

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.worker import Worker


def run(strategy, number: int, function: str, seconds: float, first_seed=0):
  """Tries inputs in a separate process.

  Args:
    strategy: Draws tuples of arguments for the function.
    number: Number of inputs.
    function: `module:name` of the function to call.
    seconds: Time limit of an input.
    first_seed: Determines the inputs.

  Returns:
    The number of outcomes of each kind, and (input, outcome) of each input that
    was neither 'done' nor 'refused'.
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
