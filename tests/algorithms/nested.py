"""Federations and checks for methods over nested widths."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.aggregation.nested_widths import make_nets
from fedjax_het.aggregation.slicing import extract
from fedjax_het.engine import rounds
from fedjax_het.engine.types import Federation, Group, Visit
from fedjax_het.models import Variables, create
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  tiny_data,
  tiny_local,
  with_group_options,
)

KEYS = (jax.random.key(1), jax.random.key(2))
SGD = tiny_local(optax.sgd, 0.1, 2, 8)


def small(*rates, norm='none', local=SGD, hidden=4, per_group=2):
  """Groups g0, g1, ... of an MLP of two hidden layers."""
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=hidden, norm=norm)
  groups = tuple(
      Group(f'g{i}', model, np.arange(per_group) * len(rates) + i)
      for i in range(len(rates))
  )
  return with_group_options(Federation(groups, local), rate=rates)


def run(algorithm, federation, num_rounds=2):
  """The server's state before and after rounds of all four clients."""
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state.server)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  for _ in range(num_rounds):
    state, _ = run_round(state, tiny_data((5, 8, 3, 7)), *KEYS)
  return before, jax.device_get(state.server)


def check_messages(make, num_weights: int, **options) -> None:
  """A message holds a client's slice and the statistics of its widths.

  Args:
    make: The method's constructor.
    num_weights: Coefficients that an upload has besides.
    **options: Of the method, but for `widths`.
  """
  federation = small('1/2', '1', norm='batch', per_group=1)
  algorithm = make(federation, widths=('1', '1/2', '1/4'), **options)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))
  for group, k, widths in zip(federation.groups, (2, 4), ((1, 2), (1, 2, 4))):
    def visit_of(group=group):
      server = algorithm.init(jax.random.key(0))
      sent = algorithm.downlink(server, group, visit)
      data = tiny_data().client(0)
      return sent, algorithm.client_update(group, (), sent, data, visit)[1]

    down, up = jax.eval_shape(visit_of)
    numbers = k * (4 + k + NUM_CLASSES) + NUM_CLASSES + 2 * 3 * k
    # Mean and variance of two norms, for each width.
    numbers += sum(2 * 2 * w for w in widths)
    assert _count(down) == numbers
    assert _count(up.summed) == numbers + num_weights
    assert up.kept is None


def check_evaluation(make) -> None:
  """Every width is evaluated with its slice and its own statistics."""
  federation = small('1', '1/2', norm='batch', per_group=1)
  algorithm = make(federation, widths=('1/4', '1/2', '1'))
  server, group = algorithm.init(jax.random.key(0)), federation.groups[0]
  shifted = {
      name: jax.tree.map(lambda s, i=i: s + 0.1 * i, stats)
      for i, (name, stats) in enumerate(server.stats.items(), 1)
  }
  server = server._replace(stats=shifted)
  variables = algorithm.client_model(server, (), group)
  assert algorithm.one_model and not algorithm.personal
  assert list(algorithm.views) == ['rate_0.25', 'rate_0.5']
  assert not make(federation, views=False).views
  found = algorithm.views | {'rate_1': algorithm.predict}
  x = jax.random.normal(jax.random.key(3), (8, *SHAPE))
  rates = [Fraction(1, 4), Fraction(1, 2), Fraction(1)]
  for net in make_nets(group.model, rates):
    held = extract(server.params, net.index.params)
    want, _ = net.model.apply(Variables(held, shifted[net.name]), x)
    got = found[net.name](group, variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
  assert np.all(np.ptp(got, axis=0) > 0)  # The widest: not all units are off.


def check_weights(make) -> None:
  """An upload's weight: the examples, or one; 0 without a local step."""
  federation, data = small('1/2'), tiny_data((5, 8))
  group, visit = federation.groups[0], Visit(0, 0, jax.random.key(4))
  for weights, cases in (('uniform', {5: 1, 0: 0}), ('data', {5: 5})):
    algorithm = make(federation, weights=weights)
    server = algorithm.init(jax.random.key(0))
    sent = algorithm.downlink(server, group, visit)

    @jax.jit
    def weight(size, algorithm=algorithm, sent=sent):
      given = data.replace(sizes=data.sizes.at[0].set(size)).client(0)
      up = algorithm.client_update(group, (), sent, given, visit)[1]
      return up.summed.weight

    for size, want in cases.items():
      found = jax.tree.leaves(weight(size))
      assert found and all(number == want for number in found)


def _count(tree) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))
