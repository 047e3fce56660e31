"""With equal models and a learning rate of 0 nothing changes under any clock.

No model moves, and a client distils from what it computes itself. So every
distillation loss is 0, however stale an upload is.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.federated import federate
from fedjax_het.engine import asynchronous, rounds
from fedjax_het.engine.clock import MODES, Device, Fleet, plan
from fedjax_het.engine.events import round_events
from fedjax_het.engine.needs import needs_of
from tests.algorithms.suite import clocks
from tests.tiny import SHAPE, one_model_federation, preprocess, tiny_local

NUM_PUBLIC = 9
SPEEDS = (4.0, 1.0, 2.5)  # Seconds per visit, for the asynchronous clock.
NUM = len(SPEEDS)
SIZE = 3
KEY = jax.random.key(1)


def make_data():
  """Public examples differ, so that the subset of a consensus matters.

  A client's are all alike: the means by class are then what each example has.
  """
  rng = np.random.default_rng(0)
  own = NUM * SIZE
  images = rng.integers(0, 255, (own + NUM_PUBLIC, *SHAPE)).astype(np.uint8)
  images[:own] = images[0]
  labels = np.concatenate([np.ones(own, int), np.arange(NUM_PUBLIC) % 3])
  parts = np.split(np.arange(own), NUM)
  return federate(
      images, labels, parts, preprocess, np.arange(own, len(images))
  )


@functools.cache
def make(name):
  federation = one_model_federation(
      False,
      1,
      NUM,
      local=tiny_local(optax.sgd, 0.0, epochs=1, batch_size=2),
      sizes=np.full(NUM, SIZE),
      num_public=NUM_PUBLIC,
  )
  if needs_of(ALGORITHMS[name]).server_model:
    (group,) = federation.groups
    federation = dataclasses.replace(federation, server_model=group.model)
  return ALGORITHMS[name](federation, **clocks(name).options), federation


@functools.cache
def program(name, clock):
  """The round; both asynchronous clocks share a program."""
  algorithm, federation = make(name)
  make_round = rounds.make_round
  if clock != 'synchronous':
    make_round = asynchronous.make_async_round
  return make_round(algorithm, federation, cohort_size=NUM, backend='map')


@functools.cache
def warmed_up(name):
  """The state before the first round, on the host."""
  algorithm, federation = make(name)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  if algorithm.warm_up is not None:
    warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
    state, _ = warm_up(state, make_data(), KEY)
  return jax.device_get(state)


def describe(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def run(name, clock):
  """States before and after three rounds, and the rounds' reports."""
  algorithm, federation = make(name)
  before, data = warmed_up(name), make_data()
  state, turns = before, [KEY] * 3
  if clock != 'synchronous':
    devices = [Device(examples_per_second=1 / s, latency=0.0) for s in SPEEDS]
    fleet = Fleet(devices, *([n] * NUM for n in (1, 0, 0)))
    schedule = plan(fleet, 3 * NUM, clock)
    turns = round_events(schedule, federation, NUM)
    state = asynchronous.init_async_state(algorithm, federation, state, data)
  run_round = program(name, 'async' if clock in MODES else clock)
  start, reports = describe(state), []
  for turn in turns:
    state, report = run_round(jax.device_put(state), data, KEY, turn)
    assert describe(state) == start
    reports.append(jax.device_get(report))
  return before, jax.device_get(state), reports


def models(name, state):
  """The evaluated models of all clients, as far as they are trained."""
  algorithm, federation = make(name)
  found = [
      algorithm.client_model(
          state.server,
          jax.tree.map(lambda leaf, i=i: leaf[i], state.clients[group.name]),
          group,
      )
      for group in federation.groups
      for i in range(group.num_clients)
  ]
  return [clocks(name).part(model) for model in found]


@pytest.mark.parametrize(('clock', 'name'), [
    *itertools.product(MODES, sorted(ALGORITHMS)),
    *(
        pytest.param('synchronous', name, marks=pytest.mark.slow)
        for name in sorted(ALGORITHMS)
        if clocks(name).loss
    ),
])  # fmt: skip
def test_equal_models_that_do_not_learn_agree(name, clock):
  before, after, reports = run(name, clock)
  assert int(after.round_num) == 3
  old, new = models(name, before), models(name, after)
  # Up to rounding, since a server may average models instead of changes.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  jax.tree.map(close, new, old)
  jax.tree.map(np.testing.assert_array_equal, new[1:], [new[0]] * (NUM - 1))
  metrics = {
      key: np.stack([report['tiny1'].metrics[key] for report in reports])
      for key in reports[0]['tiny1'].metrics
  }
  if clocks(name).loss:
    np.testing.assert_allclose(metrics[clocks(name).loss], 0.0, atol=1e-6)
  # Clients of one model train other parts of it, whose losses differ.
  if not needs_of(ALGORITHMS[name]).one_model:
    # What remains of the loss is the cross-entropy, equal for all.
    # MOON's l is log 2 for equal models, but 0 on a first visit.
    losses = metrics['train_loss'] - metrics.get('contrastive_loss', 0.0)
    np.testing.assert_allclose(losses, losses[0, 0], rtol=1e-5)
