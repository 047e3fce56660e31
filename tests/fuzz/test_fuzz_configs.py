"""No config ends in a traceback or hangs; see `configs` for what is tried."""

from hypothesis import strategies as st
import pytest

from fedjax_het import options as opt
from fedjax_het.algorithms import ALGORITHMS
from tests.fuzz import configs, trials

TRY = 'tests.fuzz.configs:try_config'


# Tracing deep models takes most of the time.
SHALLOW = ('mlp', 'mini_resnet6', 'mini_vit4', 'simple_cnn', 'fedhe_cnn0')


def build(number, seed, **options):
  cases = st.tuples(configs.cases(**options))
  return trials.run(cases, number, TRY, seconds=120, first_seed=seed)


def test_some_configs():
  """How many of either kind there are changes with every new option."""
  totals, wrong = build(40, seed=1, models=SHALLOW)
  assert not wrong
  assert totals['done'] and totals['refused']


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
  totals, wrong = trials.run(cases, 30, TRY, seconds=600, first_seed=3)
  assert not wrong
  assert totals['done'] and totals['refused']
