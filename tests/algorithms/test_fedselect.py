"""FedSelect by hand, in NumPy over five rounds, beside FedAvg and Private."""

import dataclasses
import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights
from fedjax_het.aggregation.exchange import Delta, make_exchange
from fedjax_het.algorithms import fedavg, fedselect, private
from fedjax_het.algorithms.fedselect import Sent, alternate
from fedjax_het.algorithms.fedselect.growth import grow, packed
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.local import fit_model, init_optimizer
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Visit,
)
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel
from tests.algorithms.suite import Case
from tests.algorithms.test_scaffold import oracle_gradient
from tests.quadratics import play, quadratics
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_trees

KEY = jax.random.key(0)
CLOSE = dict(rtol=1e-5, atol=1e-6)
# Growth after the second visit, so that two rounds have personal entries.
SUITE = [Case(dict(period=1))]


# How masks grow.


def tensor(values, dtype=jnp.float32):
  return dict(block=dict(kernel=jnp.array(values, dtype)))


def grown(mask, change, growth=0.25, limit=0.8):
  """The new mask of one kernel whose entries have moved by `change`."""
  reference = tensor(np.zeros(np.shape(change)))
  new = jax.jit(grow)(
      tensor(mask, bool), tensor(change), reference, growth, limit
  )
  return np.asarray(new['block']['kernel'])


def test_the_entries_with_the_largest_change_become_personal():
  mask = grown([0, 0, 0, 0], [0.1, -0.4, 0.2, 0.3])
  assert mask.tolist() == [False, True, False, False]
  mask = grown(mask, [-0.5, 9.0, 0.2, 0.3], growth=0.34)
  assert mask.tolist() == [True, True, False, False]
  # Ties go to the first entry.
  assert grown([0, 0, 0, 0], [0.0] * 4).tolist() == [True, False, False, False]
  assert grown([[0, 1], [0, 0]], [[0.1, 9], [0.1, 0.2]]).tolist() == [
      [False, True], [False, True]
  ]


@pytest.mark.parametrize(
    ('free', 'want'), [(1, 0), (2, 0), (3, 1), (4, 1), (6, 2)]
)
def test_the_number_is_rounded_half_to_even(free, want):
  assert grown([0] * free, np.arange(free)).sum() == want


@pytest.mark.parametrize(
    ('size', 'want'),
    [
        (64, [16, 28, 37, 44, 49, 53, 53]),
        (4096, [1024, 1792, 2368, 2800, 3124, 3367, 3367]),
    ],
)
def test_growth_ends_above_the_limit(size, want):
  mask, rng, found = np.zeros(size, bool), np.random.default_rng(0), []
  for _ in want:
    new = grown(mask, rng.normal(size=size))
    assert np.all(new[mask])  # Masks only grow.
    mask = new
    found.append(int(mask.sum()))
  assert found == want


def test_the_limit_itself_still_grows():
  half = [1, 1, 0, 0, 0, 0, 1, 1]
  change = np.arange(8.0)
  assert grown(half, change, limit=0.5).sum() == 5
  assert grown(half, change, limit=0.49).sum() == 4
  many = np.arange(1000) < 750
  assert grown(many, np.arange(1000.0), limit=0.75).sum() > 750
  assert grown([0] * 8, change, limit=0.0).sum() == 2
  assert grown([0] * 8, change, growth=0.0).sum() == 0


def test_biases_have_no_mask():
  tree = dict(a=dict(kernel=jnp.ones((3, 4)), bias=jnp.full(4, 9.0)),
              b=dict(scale=jnp.ones(5), bias=jnp.ones(5)))  # fmt: skip
  nothing = jax.tree.map(lambda a: np.zeros(a.shape, bool), tree)
  zero = jax.tree.map(np.zeros_like, tree)
  got = jax.jit(grow)(nothing, tree, zero, 1.0, 0.8)
  assert np.all(got['a']['kernel']) and np.all(got['b']['scale'])
  assert not np.any(got['a']['bias']) and not np.any(got['b']['bias'])
  bits = packed(got)
  assert bits.dtype == jnp.uint8 and bits.size == 3  # 17 entries.
  assert np.unpackbits(np.asarray(bits)).sum() == 17


# Pairs of a personal and a shared epoch.


def adamw(lr):
  return optax.adamw(lr, weight_decay=0.1)


def local_visit(tx, epochs=2, **kwargs):
  federation = tiny_federation(
      (1,), 1, norm=False, local=tiny_local(tx, 0.1, epochs, 8, **kwargs)
  )
  (group,), data = federation.groups, tiny_data((8,)).client(0)
  start = group.model.init(KEY)
  visit = Visit(jnp.int32(0), jnp.int32(0), KEY)
  return jax.jit(
      lambda mask: alternate(
          group.model, federation.local, start, data, visit, mask
      )
  ), start


def half_mask(params):
  return jax.tree_util.tree_map_with_path(
      lambda path, a: jnp.zeros(a.shape, bool)
      if path[-1].key == 'bias'
      else jnp.arange(a.size).reshape(a.shape) % 2 == 0,
      params,
  )


def test_moments_of_one_half_do_not_move_the_other():
  """Adam by hand: two states, each with its own count of steps."""
  run, start = local_visit(adamw, epochs=2)
  mask = half_mask(start.params)
  end, _, num = run(mask)
  assert int(num) == 4
  data = tiny_data((8,)).client(0)
  model = tiny_federation((1,), 1, norm=False).groups[0].model
  batch = data.batch(jnp.arange(8))

  def loss(params):
    logits, _ = model.apply(start._replace(params=params), batch.x)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
    )

  tx, params = adamw(0.1), start.params
  states = {True: tx.init(params), False: tx.init(params)}

  @jax.jit
  def step(params, state, personal):
    moves = jax.tree.map(lambda m: m == personal, mask)
    grads = jax.tree.map(
        lambda m, g: jnp.where(m, g, 0), moves, jax.grad(loss)(params)
    )
    updates, state = tx.update(grads, state, params)
    params = jax.tree.map(
        lambda m, p, u: jnp.where(m, p + u, p), moves, params, updates
    )
    return params, state

  for personal in (True, False, True, False):
    params, states[personal] = step(params, states[personal], personal)
  assert_trees(end.params, params, rtol=1e-4, atol=1e-5)


def test_an_empty_mask_has_no_personal_epochs():
  run, start = local_visit(optax.sgd, epochs=3)
  nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, bool), start.params)
  end, loss, num = run(nothing)
  assert int(num) == 3 and float(loss) > 0
  everything = jax.tree.map(jnp.ones_like, nothing)
  same, other_loss, num = run(everything)
  assert int(num) == 3
  # Full batches: the epochs are the same.
  assert_trees(same, end, **CLOSE)
  np.testing.assert_allclose(loss, other_loss, rtol=1e-5)


def test_a_visit_of_steps_is_one_pair():
  run, start = local_visit(optax.sgd, epochs=9, steps=2)
  assert int(run(half_mask(start.params))[2]) == 4


# Rounds of the engine.


def small(norm=False, lr=0.1, **fields):
  """Depths 1 and 2, four clients; full-batch SGD."""
  federation = tiny_federation(
      (1, 2), norm=norm, local=tiny_local(optax.sgd, lr, 2, 8), **fields
  )
  return federation, tiny_data((5, 8, 3, 7))


def run(algorithm, federation, data, num, cohort_size, state=None):
  """The first state and those after each round, and the reports."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  if state is None:
    state = rounds.init_state(algorithm, federation, KEY)
  states, reports = [jax.device_get(state)], []
  for _ in range(num):
    state, report = run_round(state, data, jax.random.key(1), jax.random.key(2))
    states.append(jax.device_get(state))
    reports.append(report)
  return states, reports


def test_the_servers_momentum_is_that_of_fedavg():
  """Without personal entries, over three rounds."""
  federation, data = quadratics([1, 5])
  ends = []
  for method, options in ((fedselect, dict(growth=0.0)), (fedavg, {})):
    algorithm = method(federation, server_momentum=0.9, **options)
    played = play(algorithm, federation, data, [(0, 1)] * 3)
    ends.append([float(s.variables.params['l1']['w']) for s, _ in played])
  np.testing.assert_allclose(*ends, rtol=1e-5)


def test_tensors_above_the_limit_no_longer_grow():
  """16 entries of mid0's kernel: 8, then 12 of them, above 0.6."""
  states, _ = played(fedselect, period=1, growth=0.5, limit=0.6, cohort_size=4)
  shares = [
      np.mean(np.asarray(s.clients['tiny1'].mask['mid0']['Dense_0']['kernel']))
      for s in states[1:]
  ]
  np.testing.assert_allclose(shares, [0, 0.5, 0.75, 0.75, 0.75])


@functools.cache
def played(method, norm=False, num=5, cohort_size=3, **options):
  federation, data = small(norm)
  algorithm = method(federation, **options)
  return run(algorithm, federation, data, num, cohort_size)


def fedavg_in_this_order(federation):
  """FedAvg with the minibatches of FedSelect's shared epochs."""
  local = federation.local
  one = dataclasses.replace(local, epochs=1)

  def train(group, start, data, visit):
    def epoch(carry, key):
      key = jax.random.fold_in(key, 0)
      *carry, metrics, num = fit_model(
          group.model, one, carry[0], data, visit._replace(key=key),
          opt_state=carry[1],
      )  # fmt: skip
      return tuple(carry), (metrics, num)

    (end, _), (metrics, num) = jax.lax.scan(
        epoch, (start, init_optimizer(local, start.params)),
        jax.random.split(visit.key, local.epochs),
    )  # fmt: skip
    return end, jax.tree.map(jnp.mean, metrics), jnp.sum(num)

  return average_weights(make_exchange(federation, 'layerwise'), train)


@pytest.mark.parametrize(
    ('options', 'same'), [(dict(period=1, growth=0.0), 5), ({}, 4)]
)
def test_until_the_fifth_visit_it_is_fedavg_bit_for_bit(options, same):
  """Parameters and statistics; without growth in all rounds.

  With the defaults, masks are empty until the end of v = 3. So v = 4, the
  fifth visit, is the first with personal epochs.
  """
  setting = dict(norm=True, cohort_size=4)
  got, reports = played(fedselect, **setting, **options)
  want, plain = played(fedavg_in_this_order, **setting)
  for a, b in zip(got[: same + 1], want):
    assert_trees(a.server, b.server, rtol=0)
  for name, group in reports[same - 1].items():
    assert not np.any(group.metrics['personal_share'])
    np.testing.assert_allclose(
        group.metrics['train_loss'],
        plain[same - 1][name].metrics['train_loss'],
        rtol=1e-5,
    )
  if same < 5:
    assert all(np.all(g.metrics['personal_share']) for g in reports[4].values())
    differ = jax.tree.map(
        lambda a, b: np.any(a != b), got[5].server, want[5].server
    )
    assert all(jax.tree.leaves(differ))


def test_a_visit_moves_the_running_statistics():
  states, _ = played(fedselect, norm=True, cohort_size=4)
  for name, client in states[1].clients.items():
    old = states[0].clients[name].variables.stats
    assert jax.tree.leaves(old)
    moved = jax.tree.map(lambda a, b: a != b, client.variables.stats, old)
    assert all(np.all(np.any(m, axis=-1)) for m in jax.tree.leaves(moved))


class Kernel(nn.Module):
  """A dense layer without a bias, so that all its entries may be personal."""

  features: int

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dense(self.features, use_bias=False)(x.reshape(len(x), -1))


def test_all_entries_personal_is_local_training_bit_for_bit():
  """All entries grow after the second visit, and are received once more.

  Then the server's model stays, shared epochs are skipped, and rounds 3 and 4
  are those of Private, with the key of the personal epoch.
  """
  names = dict(stem=4, mid0=4, head=NUM_CLASSES)
  model = BlockModel(
      'kernels', tuple(Block(n, Kernel(k)) for n, k in names.items()), SHAPE,
      NUM_CLASSES, (1, 2),
  )  # fmt: skip
  federation = Federation(
      (Group('all', model, np.arange(2)),), tiny_local(epochs=1)
  )
  data = tiny_data((5, 8))
  algorithm = fedselect(federation, growth=1.0, period=1)
  states, reports = run(algorithm, federation, data, 4, 2)
  shares = [r['all'].metrics['personal_share'].tolist() for r in reports]
  assert shares == [[0, 0], [0, 0], [1, 1], [1, 1]]
  assert np.any(jax.tree.leaves(states[1].server)[0]
                != jax.tree.leaves(states[2].server)[0])  # fmt: skip
  for state in states[3:]:
    assert_trees(state.server, states[2].server, rtol=0)

  plain = private(federation)

  def client_update(group, client, sent, data, visit):
    (key,) = jax.random.split(visit.key, 1)
    visit = visit._replace(key=jax.random.fold_in(key, 1))
    return plain.client_update(group, client, sent, data, visit)

  start = jax.tree.map(lambda x: jnp.stack([x, x]), states[2].server)
  state = rounds.init_state(plain, federation, KEY)._replace(
      round_num=jnp.int32(2), clients=dict(all=(start, None))
  )
  want, _ = run(plain._replace(client_update=client_update), federation, data,
                2, 2, state)  # fmt: skip
  for a, b in zip(states[3:], want[1:], strict=True):
    assert_trees(a.clients['all'].variables, b.clients['all'][0], rtol=0)


# Single visits.


@functools.cache
def visited(period):
  """A new client, and its visit at learning rate 0, which returns its start.

  The visit maps the client to its new state and its uplink.
  """
  federation, data = small(lr=0.0)
  algorithm, group = fedselect(federation, period=period), federation.groups[0]
  visit = Visit(jnp.int32(0), jnp.int32(2), KEY)
  x = jax.tree.map(lambda a: jnp.full_like(a, 7.0), algorithm.init(KEY))
  sent = algorithm.downlink(x, group, visit)
  step = jax.jit(
      lambda client: algorithm.client_update(
          group, client, sent, data.client(0), visit
      )[:2]
  )
  return step, algorithm.init_client(group, 0, KEY)


def filled(client, value):
  return client._replace(
      variables=jax.tree.map(
          lambda a: jnp.full_like(a, value), client.variables
      )
  )


def test_personal_entries_are_received_once_more():
  """The first visit after growth starts from x; the next one keeps them."""
  visit, client = visited(2)
  step = lambda client: visit(client)[0]  # noqa: E731
  for visits in range(3):  # Growth at the end of v = 2.
    assert not np.any(jax.tree.leaves(client.mask)[1])
    assert int(client.visits) == visits
    client = step(filled(client, 3.0))
    assert all(np.all(a == 7) for a in jax.tree.leaves(client.variables))
  grown_mask = client.mask
  kernel = grown_mask['stem']['Dense_0']['kernel'].ravel()
  # Without a change the first entries win the ties.
  assert kernel.tolist() == [True] * 4 + [False] * 12
  assert not np.any(grown_mask['stem']['Dense_0']['bias'])
  client = step(filled(client, 3.0))
  assert all(np.all(a == 7) for a in jax.tree.leaves(client.variables))
  assert_trees(client.trained, grown_mask, rtol=0)
  client = step(filled(client, 3.0))  # v = 4: it grows again.
  for a, m in zip(
      jax.tree.leaves(client.variables), jax.tree.leaves(grown_mask)
  ):
    np.testing.assert_array_equal(a, np.where(m, 3.0, 7.0))
  assert np.sum(client.mask['stem']['Dense_0']['kernel']) == 7


def test_the_reference_is_what_was_first_received_then_what_grew():
  visit, client = visited(2)
  step = lambda client: visit(client)[0]  # noqa: E731
  client = step(client)
  assert all(np.all(a == 7) for a in jax.tree.leaves(client.reference))
  other = jax.tree.map(lambda a: a + 1.0, client.reference)
  later = step(client._replace(reference=other))
  assert_trees(later.reference, other, rtol=0)
  # Growth: entry 5 of a kernel differs most from r; then r <- w.
  kernel = later.reference['stem']['Dense_0']['kernel']
  change = jnp.full(16, 8.0).at[5].set(-9.0).reshape(kernel.shape)
  other['stem']['Dense_0']['kernel'] = change
  last = step(later._replace(reference=other))
  assert all(np.all(a == 7) for a in jax.tree.leaves(last.reference))
  mask = last.mask['stem']['Dense_0']['kernel'].ravel()
  assert np.flatnonzero(mask).tolist() == [0, 1, 2, 5]


def test_masks_can_be_read_from_the_bits():
  """Values and bits tell the server as much as the arrays that it adds up."""
  visit, client = visited(2)
  rng = np.random.default_rng(0)
  masks = jax.tree.map_with_path(
      lambda path, a: (rng.random(a.shape) < 0.3) & (path[-1].key == 'kernel'),
      client.mask,
  )
  _, uplink = visit(client._replace(mask=masks))
  bits, start = np.unpackbits(uplink.kept).astype(bool), 0
  found = jax.tree.leaves_with_path(
      uplink.summed.entries, is_leaf=lambda e: isinstance(e, Maybe)
  )
  for (path, entry), mask in zip(found, jax.tree.leaves(masks), strict=True):
    read = np.zeros(mask.shape, bool)
    if path[-1].key == 'kernel':
      read = bits[start : start + mask.size].reshape(mask.shape)
      start += mask.size
    np.testing.assert_array_equal(read, mask)
    np.testing.assert_array_equal(entry.present, 1.0 - read)
  assert start == 44 and not np.any(bits[start:])


def use_training(monkeypatch, train):
  """Replaces local training by `train(start, client_id) -> Variables`."""

  def alternate(model, local, start, data, visit, mask):
    return train(start, visit.client_id), jnp.float32(0), jnp.int32(1)

  module = sys.modules[Sent.__module__]
  monkeypatch.setattr(module, 'alternate', alternate)


def test_two_clients_by_hand(monkeypatch):
  """w_1 = (2, 4), M_1 = (0, 1) and w_2 = (6, 8), M_2 = (0, 0): x = (4, 8)."""
  federation, data = quadratics([0, 0], owned='l1 l2')
  (group,), algorithm = federation.groups, fedselect(federation)
  visit = Visit(jnp.int32(0), jnp.int32(0), KEY)

  def entries(tree, l1, l2):
    new = {'l1': dict(w=jnp.asarray(l1)), 'l2': dict(w=jnp.asarray(l2))}
    return {**tree, **new}

  def read(tree):
    return tree['l1']['w'].tolist(), tree['l2']['w'].tolist()

  ends = jnp.array([[2.0, 4.0], [6.0, 8.0]])

  def visits(server, clients):
    sent = algorithm.downlink(server, group, visit)
    new, uplinks, _ = zip(*(
        algorithm.client_update(
            group, client, sent, data.client(k), visit._replace(client_id=k)
        )
        for k, client in enumerate(clients)
    ))  # fmt: skip
    return new, jax.tree.map(jnp.add, *(up.summed for up in uplinks))

  server = algorithm.init(KEY)
  server = server._replace(params=entries(server.params, 1.0, 1.0))
  clients = []
  for k, m in enumerate((True, False)):
    new = algorithm.init_client(group, k, KEY)
    clients.append(new._replace(mask=entries(new.mask, False, m)))
  use_training(monkeypatch, lambda start, k: start._replace(
      params=entries(start.params, *ends[k])
  ))  # fmt: skip
  clients, total = visits(server, clients)
  received = {group.name: Received(total, None, None)}
  server = server_step(algorithm, server, received)
  assert read(server.params) == (4.0, 8.0)
  # Now both entries of client 1 become personal. Its next start has the old
  # mask; the start after that has no entry of x.
  everything = entries(clients[0].mask, True, True)
  clients = clients[0]._replace(mask=everything), clients[1]
  use_training(monkeypatch, lambda start, k: start)
  clients, _ = visits(server, clients)
  starts = [read(client.variables.params) for client in clients]
  assert starts == [(4.0, 4.0), (4.0, 8.0)]
  server = server._replace(params=entries(server.params, 9.0, 9.0))
  clients, _ = visits(server, clients)
  starts = [read(client.variables.params) for client in clients]
  assert starts == [(4.0, 4.0), (9.0, 9.0)]


def test_bytes_up_of_the_five_resnets(monkeypatch):
  """After six growths of every tensor, for 12,288,023 numbers on average.

  If all had masks, and 0.822021 of them were personal, 2,187,010 numbers and
  384,001 words of bits would travel. Biases have no masks.
  """
  use_training(monkeypatch, lambda start, k: start)
  models = [create(f'resnet{d}', (32, 32, 3), 10) for d in range(10, 27, 4)]
  groups = tuple(
      Group(model.name, model, np.array([k])) for k, model in enumerate(models)
  )
  federation = Federation(groups, tiny_local(), local_stats=True)
  algorithm = fedselect(federation)
  data = jax.eval_shape(lambda: tiny_data((1,)).client(0))
  visit = jax.eval_shape(lambda: Visit(jnp.int32(0), jnp.int32(0), KEY))

  def upload(group, data, visit):
    client = algorithm.init_client(group, 0, KEY)
    sent = algorithm.downlink(algorithm.init(KEY), group, visit)
    _, uplink, _ = algorithm.client_update(group, client, sent, data, visit)
    return uplink

  numbers, shared, words = [], [], []
  for group in groups:
    up = jax.eval_shape(functools.partial(upload, group), data, visit)
    entries = jax.tree.leaves_with_path(
        up.summed.entries, is_leaf=lambda e: isinstance(e, Maybe)
    )
    sizes = [(e.value.size, p[-1].key != 'bias') for p, e in entries]
    # And the coefficient of the client.
    assert traffic.full_bytes(up.summed) == 4 * sum(n for n, _ in sizes) + 4
    free = [n for n, _ in sizes]
    for _ in range(6):
      free = [round(0.75 * f) if m else f for f, (_, m) in zip(free, sizes)]
    numbers.append(sum(n for n, _ in sizes))
    shared.append(sum(free))
    words.append(up.kept.size / 4)
  mean = np.mean(numbers)
  assert round(mean * (1 - 0.822021)) == 2_187_010
  assert np.ceil(mean / 32) == 384_001
  assert round(np.mean(shared)) == 2_191_149
  assert np.ceil(np.mean(words)) == 383_844


def test_bytes_up_are_the_shared_entries_and_the_masks():
  """Depth 1: 55 parameters and 44 bits of masks; depth 2: 75 and 60."""
  states, reports = played(fedselect, period=1)
  for number, report in enumerate(reports):
    for name, (size, bits) in dict(tiny1=(55, 6), tiny2=(75, 8)).items():
      ids = report[name].client_id
      rows = np.asarray(ids[ids < 4]) // 2
      masks = jax.tree.leaves(states[number].clients[name].mask)
      personal = sum(int(np.sum(m[rows])) for m in masks)
      down, up = rounds.round_bytes(report[name], 4)
      assert down == len(rows) * 4 * size
      # And the coefficient of each client.
      assert up == 4 * (len(rows) * size - personal) + len(rows) * (bits + 4)


# Rounds in NumPy.


def leaves_of(tree):
  """{(block, leaf): float64 array}, without Flax's layer names."""
  return {
      (n, i): np.asarray(a, np.float64)
      for n, block in tree.items()
      for i, a in block['Dense_0'].items()
  }


class Oracle:
  """FedSelect as in the paper, on {(block, leaf): array}."""

  def __init__(self, x, names, batches, rate, pairs, period):
    self.x, self.names, self.batches = x, names, batches
    self.rate, self.pairs, self.period = rate, pairs, period
    mine = {k: [e for e in x if e[0] in names[k]] for k in names}
    self.w = {k: {e: x[e] for e in mine[k]} for k in names}
    self.mask = {
        k: {e: np.zeros(x[e].shape) for e in mine[k]} for k in names
    }
    self.old = {k: dict(self.mask[k]) for k in names}
    self.r, self.v = {}, dict.fromkeys(names, 0)

  def visit(self, k):
    mask, old = self.mask[k], self.old[k]
    w = {e: old[e] * self.w[k][e] + (1 - old[e]) * self.x[e] for e in mask}
    if self.v[k] == 0:
      self.r[k] = dict(w)
    epochs = [mask, {e: 1 - m for e, m in mask.items()}] * self.pairs
    for part in epochs:
      nested = {n: {} for n in self.names[k]}
      for (n, i), a in w.items():
        nested[n][i] = a
      g = oracle_gradient(nested, self.names[k], *self.batches[k])
      w = {e: w[e] - self.rate * part[e] * g[e[0]][e[1]] for e in w}
    self.w[k], self.old[k] = w, mask
    new = dict(mask)
    if self.v[k] and self.v[k] % self.period == 0:
      for e in mask:
        if e[1] != 'kernel' or mask[e].mean() > 0.8:
          continue
        free = np.flatnonzero(mask[e].ravel() == 0)
        change = np.abs(w[e] - self.r[k][e]).ravel()[free]
        number = len(free) - round(0.75 * len(free))
        best = free[np.argsort(-change, kind='stable')[:number]]
        flat = mask[e].ravel().copy()
        flat[best] = 1
        new[e] = flat.reshape(mask[e].shape)
      self.r[k] = dict(w)
    self.mask[k] = new
    self.v[k] += 1
    return mask

  def round(self, cohort):
    used = {k: self.visit(k) for k in cohort}
    x = {}
    for e, old in self.x.items():
      owners = [k for k in cohort if e in self.w[k]]
      count = sum(1 - used[k][e] for k in owners)
      total = sum((1 - used[k][e]) * (self.w[k][e] - old) for k in owners)
      x[e] = np.where(count > 0, old + total / np.maximum(count, 1), old)
    self.x = x


def test_five_rounds_in_numpy():
  """Two architectures, three of four clients a round, growth from visit 1."""
  states, reports = played(fedselect, period=1)
  federation, data = small()
  images = np.asarray(preprocess(data.images), np.float64)
  names, batches = {}, {}
  for group in federation.groups:
    for k in group.client_ids.tolist():
      names[k] = list(group.model.block_names)
      index = np.asarray(data.index[k, : data.sizes[k]])
      batches[k] = (
          images[index].reshape(len(index), -1), np.asarray(data.labels)[index]
      )
  oracle = Oracle(
      leaves_of(states[0].server.params), names, batches, 0.1, 2, 1
  )
  for state, report in zip(states[1:], reports, strict=True):
    ids = np.concatenate([r.client_id for r in report.values()])
    oracle.round(sorted(ids[ids < 4].tolist()))
    got = leaves_of(state.server.params)
    for e in got:
      np.testing.assert_allclose(got[e], oracle.x[e], **CLOSE)
    for group in federation.groups:
      for row, k in enumerate(group.client_ids.tolist()):
        mine = jax.tree.map(
            lambda a, row=row: a[row], state.clients[group.name]
        )
        for tree, want in (
            (mine.variables.params, oracle.w[k]), (mine.mask, oracle.mask[k]),
            (mine.trained, oracle.old[k]),
        ):
          found = leaves_of(tree)
          for e in found:
            np.testing.assert_allclose(found[e], want[e], **CLOSE)
  assert sum(np.sum(m) for m in jax.tree.leaves(oracle.old)) > 40


def test_evaluated_models_are_the_clients_and_the_servers():
  states, _ = played(fedselect, norm=True, cohort_size=4)
  federation, _ = small(norm=True)
  algorithm, group = fedselect(federation), federation.groups[1]
  client = jax.tree.map(lambda a: a[0], states[-1].clients['tiny2'])
  found = algorithm.client_model(states[-1].server, client, group)
  assert_trees(tuple(found[:2]), tuple(client.variables), rtol=0)
  want = fedavg(federation).client_model(states[-1].server, (), group)
  assert_trees(found.shared, want, rtol=0)
  assert algorithm.personal and list(algorithm.views) == ['global']


def test_entries_that_nobody_shares_keep_their_value():
  """x = 1; tiny1 sends even entries with change 1, tiny2 sends none."""
  federation, _ = small()
  algorithm = fedselect(federation)
  server = jax.tree.map(jnp.ones_like, algorithm.init(KEY))
  received = {}
  for group in federation.groups:
    def entry(a, own=group.name == 'tiny1'):
      shared = (jnp.arange(a.size) % 2 == 0).reshape(a.shape) & own
      return Maybe(jnp.where(shared, 1.0, 0.0), jnp.float32(shared))

    params = {n: server.params[n] for n in group.model.block_names}
    sent = Sent(
        jax.tree.map(entry, params), Delta({}, {}, jnp.float32(1))
    )
    received[group.name] = Received(sent, None, None)
  after = server_step(algorithm, server, received)
  for name, block in after.params.items():
    for leaf in jax.tree.leaves(block):
      want = 1.0 + (np.arange(leaf.size) % 2 == 0) * (name != 'mid1')
      np.testing.assert_array_equal(leaf.ravel(), want)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(growth=1.5), 'growth must be at least 0 and at most 1, got 1.5.'),
        (dict(limit=-0.1), 'limit must be at least 0 and at most 1, got -0.1.'),
        (dict(period=0), 'period must be at least 1, got 0.'),
        (dict(aggregation='all'), "Unknown aggregation 'all'"),
    ],
)
def test_wrong_options_are_refused(options, message):
  with pytest.raises(ValueError) as error:
    fedselect(tiny_federation(), **options)
  assert str(error.value).startswith(message)
