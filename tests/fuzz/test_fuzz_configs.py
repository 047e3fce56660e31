"""No config ends in a traceback or hangs; see `configs` for what is tried."""

from hypothesis import strategies as st
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.experiment import options as opt
from tests.fuzz import configs, trials

TRY = 'tests.fuzz.configs:try_config'


def build(number, seed):
  return trials.run(
      st.tuples(configs.cases()), number, TRY, seconds=60, first_seed=seed
  )


def test_some_configs():
  totals, wrong = build(100, seed=1)
  assert not wrong
  assert totals['done'] > 10 and totals['refused'] > 10


def test_a_new_option_is_tried_without_a_word():
  for name, constructor in ALGORITHMS.items():
    found = configs.entries(name, 'iid', 'mlp')
    for option in opt.keyword_options(constructor):
      assert ('algorithm', option) in found


@pytest.mark.slow
def test_many_configs():
  totals, wrong = build(1200, seed=2)
  assert not wrong
  assert sum(totals.values()) >= 1000


@pytest.mark.slow
def test_some_runs():
  """Two rounds each; a program that compiles slowly does not hang."""
  cases = st.tuples(configs.cases(work=True), st.just(2))
  totals, wrong = trials.run(cases, 30, TRY, seconds=300, first_seed=3)
  assert not wrong
  assert totals['done'] > 5
