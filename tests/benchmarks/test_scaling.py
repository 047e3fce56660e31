"""The measured assignment is never worse than round-robin."""

import jax
import numpy as np

from benchmarks import idle_rounds, scaling


def test_balance_lies_between_the_best_and_in_turn():
  rows = scaling.balance_part(quick=True)
  assert len(rows) == 9
  for kind, devices, in_turn, greedy, best in rows:
    assert best <= greedy + 1e-6 and greedy <= in_turn + 1e-6, (kind, devices)
    assert best >= 1


def test_all_visits_are_counted_wherever_the_states_lie():
  for store in idle_rounds.STORES:
    with jax.default_prng_impl('threefry2x32'):  # For several devices.
      call, state = idle_rounds.idle_rounds(12, 4, store)
      for _ in range(3):
        state = call(state)
    (group,) = state.clients.values()
    assert np.shape(group) == (12, idle_rounds.STATE_NUMBERS)
    assert np.sum(group) == 3 * 4 * idle_rounds.STATE_NUMBERS, store
