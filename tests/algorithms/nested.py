"""Federations and checks for methods over nested widths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.engine import rounds
from fedjax_het.engine.types import Federation, Group, Visit
from fedjax_het.models import create
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


def _count(tree) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))
