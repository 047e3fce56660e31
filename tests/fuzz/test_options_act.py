"""Every option of every method changes the programs."""

import re

import jax
import jax.numpy as jnp
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import rounds
from fedjax_het.options import keyword_options
from tests.algorithms import suite
from tests.tiny import SHAPE, tiny_data

pytestmark = pytest.mark.slow


def traced(fn, *args) -> str:
  """The program of a function, with its constants, as text."""
  return jax.jit(fn).lower(*args).as_text()


def programs(algorithm, federation) -> str:
  """Initial state, warm-up, round, evaluation of a method, as text."""
  key, data = jax.random.key(0), tiny_data(public=suite.NUM_PUBLIC)

  def init(key):
    return rounds.init_state(algorithm, federation, key)

  state = jax.eval_shape(init, key)
  run = rounds.make_round(algorithm, federation, cohort_size=2, backend='map')
  found = [traced(init, key), traced(run, state, data, key, key)]
  if algorithm.warm_up is not None:
    warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
    found.append(traced(warm_up, state, data, key))
  if algorithm.calibrate is not None:
    found.append(traced(algorithm.calibrate, state.server, data))
  x = jnp.zeros((2, *SHAPE))
  for group in federation.groups:

    def evaluate(state, group=group):
      client = jax.tree.map(lambda leaf: leaf[0], state.clients[group.name])
      model = algorithm.client_model(state.server, client, group)
      predict = [algorithm.predict, *algorithm.views.values()]
      return [p(group, model, x) for p in predict]

    found.append(traced(evaluate, state))
  return '\n'.join(found)


def others(make, default) -> list:
  """Other values that an option might have; some may be refused."""
  if isinstance(default, bool):
    return [not default]
  if isinstance(default, int):
    return [default + 1, default - 1, -default]
  if isinstance(default, float):
    return [0.4 * default + 0.3, default + 0.5]
  if isinstance(default, str):  # The error for an unknown value lists all.
    with pytest.raises(ValueError) as error:
      make('unheard_of')
    words = re.findall('[a-z][a-z_0-9]*', str(error.value))
    return [word for word in words if word != default]
  if isinstance(default, tuple):  # Shares, or numbers for each of them.
    return [('1', '1/4'), ('1', '1/2', '1/4'), (1.0, 2.0), ('1/2',)]
  return [1, 0.5, 2, 8, 'tiny1', 'tiny2']


def without_effect(name, case) -> set[str]:
  """The options that change nothing, alone or beside another value of one of
  the other options."""  # fmt: skip
  federation = suite.needed_federation(name, norm=True)
  _, federation = suite.make(name, federation, case)
  options = {
      option: case.options.get(option, default)
      for option, (_, default) in keyword_options(ALGORITHMS[name]).items()
  }
  known: dict[str, str | None] = {}

  def text(**given):
    """The programs; None if these options are refused together."""
    words = repr(sorted(given.items()))
    if words not in known:
      with_given = case._replace(options={**case.options, **given})
      try:
        algorithm, _ = suite.make(name, federation, with_given)
        known[words] = programs(algorithm, federation)
      except (TypeError, ValueError):
        known[words] = None
    return known[words]

  def values(option):
    def make(value):
      given = case._replace(options={**case.options, option: value})
      return suite.make(name, federation, given)

    return others(make, options[option])

  def acts(option, **beside):
    before = text(**beside)
    return before is not None and any(
        text(**beside, **{option: value}) not in (before, None)
        for value in values(option)
    )

  assert text() is not None
  return {
      option
      for option in options.keys() - suite.told(name, 'UNSEEN', set())
      if not acts(option)
      and not any(
          acts(option, **{other: value})
          for other in options
          if other != option
          for value in values(other)
      )
  }


@pytest.mark.parametrize('name', ALGORITHMS)
def test_every_option_acts(name):
  """In one of the cases of the shared suite."""
  idle = None
  for case in suite.cases(name):
    if idle is None or idle:
      found = without_effect(name, case)
      idle = found if idle is None else idle & found
  assert not idle, f'{name}: {idle} change nothing'
