"""The deal that the benchmark measures is never worse than dealing in turn."""

from benchmarks import scaling


def test_balance_lies_between_the_best_and_in_turn():
  rows = scaling.balance_part(quick=True)
  assert len(rows) == 9
  for kind, devices, in_turn, greedy, best in rows:
    assert best <= greedy + 1e-6 and greedy <= in_turn + 1e-6, (kind, devices)
    assert best >= 1
