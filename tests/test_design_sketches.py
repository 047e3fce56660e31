"""The methods sketched in docs/design.md run, and do what they claim."""

import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms import fedavg
from fedjax_het.engine import local as local_lib
from fedjax_het.engine import rounds
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Maybe,
  Uplink,
)
from fedjax_het.models import Variables
from tests.tiny import (
  NUM_CLASSES,
  tiny_data,
  tiny_federation,
  tiny_local,
)

TEXT = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'design.md'
NOTHING = Variables({}, {})
SIZES = (5, 8, 3, 7)


class Server(NamedTuple):
  """FedGKT's: a large net, and logits by client and example."""

  net: Any
  logits: Any


class Logits(NamedTuple):
  """Sums of logits and counts, by class."""

  sums: Any
  counts: Any


def sketch(name, federation, **names):
  """A sketch's functions, with all that the text says they share."""
  blocks = dict(
      re.findall(
          r'<!-- sketch: (\w+) -->\n```python\n(.*?)```', TEXT.read_text(), re.S
      )
  )
  names.update(
      jax=jax,
      jnp=jnp,
      optax=optax,
      Maybe=Maybe,
      Uplink=Uplink,
      Variables=Variables,
      NOTHING=NOTHING,
      num_classes=NUM_CLASSES,
      federation=federation,
      local=federation.local,
      **{
          n: getattr(local_lib, n)
          for n in (
              'cross_entropy',
              'masked_mean',
              'shuffled_positions',
              'train_epochs',
          )
      },
  )
  names['exchange'] = make_exchange(federation, 'layerwise')
  for block in ('shared', name):
    exec(compile(blocks[block], f'<{block}>', 'exec'), names)
  return names


def federate(**kwargs):
  """Two groups of two clients, depths 1 and 2, no norm."""
  return tiny_federation((1, 2), norm=False, **kwargs)


def averaging(names, **functions):
  """FedAvg with some functions replaced."""
  return average_weights(names['exchange'], None)._replace(**functions)


def run(algorithm, federation, num_rounds=1, cohort_size=4):
  """The state before and after some rounds, and the last reports."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state)
  for _ in range(num_rounds):
    state, reports = run_round(
        state, tiny_data(SIZES), jax.random.key(1), jax.random.key(2)
    )
  return before, jax.device_get(state), reports


def assert_trees(got, want, **kwargs):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, **kwargs)


def own_optimiser(federation):
  """`init_client` of a method whose model and optimiser stay."""

  def init_client(group, client_id, key):
    variables = group.model.init(key)
    tx = federation.local.optimizer(federation.local.learning_rate(0))
    return variables, tx.init(variables.params)

  return init_client


def fedhe(federation):
  names = sketch('fedhe', federation, alpha=1.0, Logits=Logits)
  return FederatedAlgorithm(
      init=lambda key: Logits(
          jnp.zeros((NUM_CLASSES, NUM_CLASSES)), jnp.zeros(NUM_CLASSES)
      ),
      init_client=own_optimiser(federation),
      downlink=names['downlink'],
      client_update=names['client_update'],
      server_update=names['server_update'],
      client_model=lambda server, client, group: client[0],
      personal=True,
  )


def test_fedhe_uploads_class_sums_over_counts_plus_one():
  """With a learning rate of 0 the logits are known in closed form."""
  federation = federate(local=tiny_local(optax.sgd, lr=0.0))
  _, state, reports = run(fedhe(federation), federation)
  data, want = tiny_data(SIZES), np.zeros((NUM_CLASSES, NUM_CLASSES))
  seen = np.zeros(NUM_CLASSES)
  for group in federation.groups:
    variables = group.model.init(jax.random.key(0))
    for i in group.client_ids:
      mine = data.index[i, : SIZES[i]]
      x = data.preprocess(data.images[mine])
      logits, _ = group.model.apply(variables, x)
      rows = np.eye(NUM_CLASSES)[data.labels[mine]]
      want += rows.T @ np.asarray(logits) / (rows.sum(0)[:, None] + 1)
      seen += rows.any(0)
  np.testing.assert_allclose(state.server.sums, want, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(state.server.counts, seen)
  up = rounds.num_bytes(reports['tiny1'].up)
  np.testing.assert_array_equal(up, 4 * NUM_CLASSES * (NUM_CLASSES + 1))


def test_fedhe_sends_known_classes_only():
  federation = federate()
  algorithm = fedhe(federation)
  sums = jnp.arange(9.0).reshape(3, 3)
  server = Logits(sums, jnp.array([2.0, 0.0, 1.0]))
  sent = algorithm.downlink(server, federation.groups[0], None)
  assert rounds.num_bytes(rounds.measure(sent)) == 2 * 4 * NUM_CLASSES
  np.testing.assert_array_equal(sent.value[0], [0, 0.5, 1])


def fedepth(federation, spans):
  names = sketch('fedepth', federation, spans=spans, skip=lambda z: z)
  return averaging(names, client_update=names['client_update'])


def test_fedepth_with_one_stage_is_fedavg():
  federation = federate()
  whole = dict(tiny1=((0, 2),), tiny2=((0, 3),))
  _, got, _ = run(fedepth(federation, whole), federation, num_rounds=2)
  _, want, _ = run(fedavg(federation), federation, num_rounds=2)
  assert_trees(got.server, want.server, rtol=1e-5, atol=1e-6)


def test_fedepth_trains_its_spans_and_the_head_alone():
  federation = federate()
  spans = dict(tiny1=((1, 2),), tiny2=((1, 2), (2, 3)))
  before, after, _ = run(fedepth(federation, spans), federation)
  for name, tree in after.server.params.items():
    same = jax.tree.map(np.array_equal, tree, before.server.params[name])
    assert all(jax.tree.leaves(same)) == (name == 'stem')


def scaffold(federation):
  owners = {}
  for group in federation.groups:
    for name in group.model.block_names:
      owners[name] = owners.get(name, 0) + group.num_clients

  def plain_loss(model):
    def loss_fn(variables, batch, key):
      logits, stats = model.apply(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
      return local_lib.cross_entropy(logits, batch.y, batch.mask), (stats, {})

    return loss_fn

  def zeros(shapes):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  names = sketch(
      'scaffold', federation, num_owners=owners, plain_loss=plain_loss
  )
  exchange = names['exchange']
  algorithm = averaging(
      names,
      init=lambda key: (
          exchange.init(key),
          zeros(jax.eval_shape(exchange.init, key).params),
      ),
      init_client=lambda group, i, key: zeros(
          group.model.abstract_variables.params
      ),
      downlink=lambda server, group, visit: (
          exchange.download(server[0], group),
          {n: server[1][n] for n in group.model.block_names},
      ),
      client_update=names['client_update'],
      server_update=names['server_update'],
  )
  return algorithm, owners


def test_scaffold_begins_as_fedavg():
  federation = federate()
  _, got, _ = run(scaffold(federation)[0], federation)
  _, want, _ = run(fedavg(federation), federation)
  assert_trees(got.server[0], want.server, rtol=1e-5, atol=1e-6)


def test_scaffold_keeps_c_the_mean_of_its_owners():
  federation = federate()
  algorithm, owners = scaffold(federation)
  _, state, _ = run(algorithm, federation, num_rounds=3, cohort_size=2)
  for name, number in owners.items():
    trees = [own[name] for own in state.clients.values() if name in own]
    total = jax.tree.map(lambda *rows: sum(r.sum(0) for r in rows), *trees)
    mean = jax.tree.map(lambda t, n=number: t / n, total)
    assert_trees(state.server[1][name], mean, rtol=1e-5, atol=1e-6)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(mean))


def moon(federation, mu):
  def cosine(u, v):
    def norm(a):
      return jnp.sqrt(jnp.maximum(jnp.sum(a * a, axis=-1), 1e-16))

    return jnp.sum(u * v, axis=-1) / (norm(u) * norm(v))

  names = sketch('moon', federation, mu=mu, tau=0.5, cosine=cosine)
  exchange = names['exchange']
  return averaging(
      names,
      client_update=names['client_update'],
      init_client=lambda group, i, key: (
          jnp.float32(0.0),
          group.model.init(key),
      ),
      client_model=lambda server, client, group: exchange.assemble(
          group, NOTHING, exchange.download(server, group)
      ),
  )


@pytest.mark.parametrize('mu,num_rounds,equal', [(1.0, 1, True),
                                                 (0.0, 2, True),
                                                 (1.0, 2, False)])
def test_moon_differs_from_fedavg_by_its_pull_alone(mu, num_rounds, equal):
  federation = federate()
  _, got, _ = run(moon(federation, mu), federation, num_rounds)
  _, want, _ = run(fedavg(federation), federation, num_rounds)
  if equal:
    assert_trees(got.server, want.server, rtol=1e-5, atol=1e-6)
  else:
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), got.server,
                        want.server)  # fmt: skip
    assert max(jax.tree.leaves(gaps)) > 1e-3


def test_fedgkt_returns_logits_to_the_examples_they_belong_to():
  """A planted server answers each example with its own label."""
  federation = federate()
  num, size = federation.num_clients, max(SIZES)

  def server_step(net, batch):
    _, _, labels, here = batch
    return net + jnp.sum(here), jax.nn.one_hot(labels, NUM_CLASSES)

  names = sketch(
      'fedgkt',
      federation,
      alpha=1.0,
      Server=Server,
      max_examples=size,
      batch_size=4,
      server_epochs=2,
      server_step=server_step,
      distillation=lambda z, teacher: jnp.sum((z - teacher) ** 2, axis=-1),
  )
  algorithm = FederatedAlgorithm(
      init=lambda key: Server(
          jnp.int32(0),
          Maybe(
              jnp.zeros((num, size, NUM_CLASSES)), jnp.zeros((num, size), bool)
          ),
      ),
      init_client=own_optimiser(federation),
      downlink=names['downlink'],
      client_update=names['client_update'],
      server_update=names['server_update'],
      client_model=lambda server, client, group: client[0],
      personal=True,
  )
  _, state, reports = run(algorithm, federation, num_rounds=2)
  data = tiny_data(SIZES)
  value, present = state.server.logits
  assert state.server.net == 2 * 2 * sum(SIZES)  # Rounds, epochs, examples.
  for i, n in enumerate(SIZES):
    assert present[i].tolist() == [True] * n + [False] * (size - n)
    labels = data.labels[data.index[i, :n]]
    np.testing.assert_array_equal(np.argmax(value[i, :n], -1), labels)
  # Features of 4, logits of 3 and a label, of 5 and 3 examples.
  up = rounds.num_bytes(reports['tiny1'].up)
  assert up.tolist() == [4 * (4 + 3 + 1) * n for n in (5, 3)]
  down = rounds.num_bytes(reports['tiny1'].down)
  assert down.tolist() == [4 * 3 * n for n in (5, 3)]

