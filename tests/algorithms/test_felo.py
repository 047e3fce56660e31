"""Felo and Velo: by hand, whole rounds in NumPy, their stores and messages."""

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.class_means import ClassVectors
from fedjax_het.algorithms import felo, private
from fedjax_het.algorithms.felo import cvae
from fedjax_het.algorithms.felo.client import (
  Record,
  Targets,
  add_batch,
  empty_record,
  make_upload,
)
from fedjax_het.algorithms.felo.rings import RingExamples, empty_rings, push
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Turn,
  Visit,
)
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.simple_cnn import Hidden
from tests.algorithms import felo_numpy
from tests.algorithms.suite import Case, Clocks
from tests.numeric import as_list, nets_and_examples
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  Dense,
  bytes_of_a_visit,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)

TINY_VELO = dict(
    velo=True, num_features=6, capacity=5, label_size=2, cvae_epochs=1
)
# For the shared tests, see `tests/algorithms/suite.py`.
SUITE = [Case(), Case(TINY_VELO)]
CLOCKS = Clocks(loss='feature_loss')
SIZES = (5, 8, 3, 7)
WIDTH = 4  # d of `tiny_model`.
VISIT = Visit(jnp.int32(0), jnp.int32(5), jax.random.key(3))
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def net_of(width, num_outputs):
  """Two hidden layers, the second of `width` features, and an output layer."""
  blocks = (
      Block('stem', Dense(1)),
      Block('mid', Dense(width)),
      Block('head', Dense(num_outputs, relu=False)),
  )
  return BlockModel('net', blocks, SHAPE, num_outputs, (1, 2))


def one_group(model, num_clients=1, **fields):
  local = fields.pop('local', None) or tiny_local()
  group = Group('g', model, np.arange(num_clients))
  return Federation((group,), local, **fields)


# The loss, by a visit of a client whose features and logits are its biases.


@functools.cache
def by_hand(**options):
  """One step of SGD, rate 1, on one example of class 0 with f=[1, 3], z=[1, 0].

  The result is a function of what is sent: (moves of the biases, metrics).
  """
  model = net_of(2, 2)
  local = tiny_local(optax.sgd, lr=1.0, batch_size=1, epochs=1)
  federation = one_group(model, local=local)
  (group,) = federation.groups
  algorithm = felo(federation, **options)
  zeros = jax.tree.map(
      lambda leaf: jnp.zeros(leaf.shape), model.abstract_variables
  )
  params = dict(zeros.params)
  for name, bias in (('mid', [1.0, 3.0]), ('head', [1.0, 0.0])):
    kernel = params[name]['Dense_0']['kernel']
    params[name] = {'Dense_0': dict(kernel=kernel, bias=jnp.array(bias))}
  client = algorithm.init_client(group, 0, jax.random.key(0))
  client = client._replace(variables=zeros._replace(params=params))
  data = tiny_data((1,))
  data = data.replace(labels=jnp.zeros_like(data.labels))

  @jax.jit
  def update(sent):
    end, _, metrics = algorithm.client_update(
        group, client, sent, data.client(0), VISIT
    )
    moves = [
        params[name]['Dense_0']['bias']
        - end.variables.params[name]['Dense_0']['bias']
        for name in ('mid', 'head')
    ]
    return moves, metrics

  return lambda sent: jax.device_get(update(sent))


def to_send(f_bar, z_bar, known):
  """`Maybe` of targets of class 0; those of class 1 are far away."""
  rows = [jnp.array([row, [50.0, 50.0]]) for row in (f_bar, z_bar)]
  return Maybe(Targets(*rows), jnp.array(known))


P = np.exp([1.0, 0.0]) / np.exp([1.0, 0.0]).sum()
SENT = to_send([0.0, 1.0], [3.0, 2.0], [True, True])


def test_the_loss_of_one_example_and_its_gradient():
  """MSE (1 + 4) / 2 and gradient [1, 2]; MSE (4 + 4) / 2 and [-2, -2]."""
  (f_move, z_move), metrics = by_hand()(SENT)  # alpha is 1/2.
  close(f_move, [0.5, 1.0])
  close(z_move, P - [1, 0] + [-1, -1])
  close(metrics['feature_loss'], 2.5)
  close(metrics['logit_loss'], 4.0)
  close(metrics['cross_entropy'], -np.log(P[0]))
  close(metrics['train_loss'], -np.log(P[0]) + 1.25 + 2.0)


def test_kl_divergence_of_logits():
  """KL(softmax([3, 2]) || softmax([1, 0])) is 0, of softmax([0, 1]) not."""
  update = by_hand(logit_loss='kl')
  assert abs(update(SENT)[1]['logit_loss']) < 1e-6
  (_, z_move), metrics = update(to_send([0, 1], [0, 1], [True, True]))
  q = P[::-1]
  close(metrics['logit_loss'], np.sum(q * np.log(q / P)) / 2)
  close(z_move, P - [1, 0] + 0.5 * (P - q) / 2)


def test_features_alone():
  """`no_logits` of the code; with f_bar = f the cross-entropy is left."""
  update = by_hand(logit_loss='none')
  (f_move, z_move), metrics = update(SENT)
  close(f_move, [0.5, 1.0])
  close(z_move, P - [1, 0])
  assert 'logit_loss' not in metrics
  (f_move, _), metrics = update(to_send([1, 3], [9, 9], [True, True]))
  close(metrics['train_loss'], -np.log(P[0]))
  close(f_move, [0, 0])


def test_a_class_that_the_server_does_not_know_has_cross_entropy_alone():
  (f_move, z_move), metrics = by_hand()(SENT._replace(
      present=jnp.array([False, True])
  ))
  assert f_move.tolist() == [0, 0]
  close(z_move, P - [1, 0])
  assert metrics['feature_loss'] == metrics['logit_loss'] == 0


def test_alpha_0_is_private_bit_for_bit():
  """With norms, dropout and an optimiser that is kept, too."""
  blocks = (
      Block('stem', Dense(WIDTH, norm=True)),
      Block('mid', Hidden(WIDTH, dropout=0.5)),
      Block('head', Dense(NUM_CLASSES, relu=False)),
  )
  model = BlockModel('net', blocks, SHAPE, NUM_CLASSES, (1, 2))
  federation = one_group(model, 2, local=tiny_local(keep_optimizer=True))
  data, group = tiny_data((5, 8)), federation.groups[0]
  rows = jnp.ones((3, WIDTH)), jnp.ones((3, 3))
  sent = Maybe(Targets(*rows), jnp.ones(3, bool))
  found = []
  for algorithm in (felo(federation, distill_weight=0.0), private(federation)):
    client = algorithm.init_client(group, 0, jax.random.key(0))

    @jax.jit
    def update(client, algorithm=algorithm):
      return algorithm.client_update(
          group, client, sent, data.client(0), VISIT
      )

    for _ in range(2):
      client, _, metrics = update(client)
    found.append((tuple(client), metrics))
  (got, metrics), (want, _) = found
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert metrics['feature_loss'] > 0 and metrics['logit_loss'] > 0


# The store.


@functools.cache
def pusher():
  return jax.jit(push)


def test_rings_are_lists_of_limited_length():
  """Against lists, with rows that do not count, and more rows than fit."""
  rng = np.random.default_rng(0)
  rings = empty_rings(3, 4, jnp.zeros(2))
  lists = [collections.deque(maxlen=4) for _ in range(3)]
  for most in (1, 2, 3, 3, 1, 3):
    rows = rng.normal(size=(9, 2)).astype(np.float32)
    ring, mask = rng.integers(0, most, 9), rng.random(9) < 0.5
    rows[~mask] = np.nan
    rings = pusher()(rings, rows, ring, mask)
    for row, k in zip(rows[mask], ring[mask]):
      lists[k].append(row)
    for k, want in enumerate(lists):
      got = np.asarray(rings.rows[k])[np.asarray(rings.filled[k])]
      assert sorted(got.tolist()) == sorted(np.array(want).tolist())
      place = (int(rings.next[k]) - 1) % 4
      if want:
        assert got.shape == (len(want), 2)
        np.testing.assert_array_equal(rings.rows[k, place], want[-1])
  assert rings.size.tolist() == [4, 4, 2]


def test_a_full_ring_keeps_the_last_two_of_three():
  rings = empty_rings(1, 2, jnp.zeros(1))
  rows = np.array([[1.0], [3.0], [5.0]], np.float32)
  rings = pusher()(rings, rows, np.zeros(3, np.int32), np.ones(3, bool))
  assert rings.rows[0, :, 0].mean() == 4
  assert rings.size.tolist() == [2]


def test_rings_as_examples():
  """Each row once, labelled by its ring."""
  rings = empty_rings(3, 4, jnp.zeros(1))
  ring = np.array([2, 0, 2, 2, 0, 2, 2], np.int32)
  rows = np.arange(7, dtype=np.float32)[:, None]
  rings = pusher()(rings, rows, ring, np.ones(7, bool))
  examples = RingExamples(rings)
  assert (int(examples.size), examples.length) == (6, 12)
  batch = examples.batch(jnp.arange(12))
  pairs = zip(batch.x[:6, 0].tolist(), batch.y[:6].tolist())
  assert sorted(pairs) == [(1, 0), (2, 2), (3, 2), (4, 0), (5, 2), (6, 2)]


def felo_upload(ids, rows, counts, logits=None):
  """Uploads of one class [S] as a group's `Received`."""
  rows = jnp.array(rows, jnp.float32)[:, None]
  counts = jnp.array(counts, jnp.float32)[:, None]
  ids = jnp.array(ids)
  logits = jnp.zeros((len(ids), 1, 1)) if logits is None else logits
  real = (ids < 3)[:, None, None]
  summed = Maybe(
      jnp.sum(jnp.where(real, jnp.asarray(logits), 0.0), axis=0),
      jnp.sum(jnp.where(real[:, :, 0], counts > 0, False), axis=0) * 1.0,
  )
  kept = Maybe(ClassVectors(rows, counts), counts > 0)
  return Received(summed, kept, ids)


def two_groups(**fields):
  """Clients 0 and 2, and 1, of one class and two features."""
  model = net_of(2, 1)
  groups = tuple(
      Group(name, model, np.array(ids))
      for name, ids in (('a', [0, 2]), ('b', [1]))
  )
  return Federation(groups, tiny_local(), **fields)


@functools.cache
def felo_server(window):
  """The federation, the algorithm and its jitted server update."""
  federation = two_groups()
  algorithm = felo(federation, window=window)

  @jax.jit
  def update(server, received):
    turn = Turn(jnp.int32(0), jax.random.key(0))
    return algorithm.server_update(server, received, turn)[0]

  return federation, algorithm, update


@pytest.mark.parametrize(
    ('window', 'want'), [(9, [3.4, 1.8]), (1, [5.0, 0.0])]
)
def test_the_mean_of_features_is_that_of_single_ones(window, want):
  """Clients 0, 1, 2 have 4, 4 and 2 examples; of the last uploads.

  Slots of client 3 are padding.
  """
  federation, algorithm, update = felo_server(window)
  nan = float('nan')
  received = dict(
      a=felo_upload([0, 2, 3], [[1, 3], [5, 0], [nan, nan]], [4, 2, 5]),
      b=felo_upload([1, 3], [[5, 1.5], [nan, nan]], [4, 5]),
  )
  server = update(algorithm.init(jax.random.key(0)), received)
  # (4 [1, 3] + 4 [5, 1.5] + 2 [5, 0]) / 10 is [3.4, 1.8].
  sent = algorithm.downlink(server, federation.groups[0], VISIT)
  close(sent.value.features, [want])
  assert sent.present.tolist() == [True]


def test_the_mean_of_logits_is_that_of_all_uploads():
  """Whatever the numbers of examples, and for longer than the window."""
  federation, algorithm, update = felo_server(1)
  server = algorithm.init(jax.random.key(0))
  far = [[9.0, 9.0]] * 2
  nobody = felo_upload([3, 3], far, [1, 1])
  for value in (1.0, 2.0, 6.0):
    rows, logits = [[value, 0], *far], jnp.full((3, 1, 1), value)
    one = felo_upload([0, 3, 3], rows, [9, 1, 1], logits)
    server = update(server, dict(a=one, b=nobody))
  sent = algorithm.downlink(server, federation.groups[0], VISIT)
  assert sent.value.logits.tolist() == [[3]]
  assert sent.value.features.tolist() == [[6, 0]]


# What a client records.


def batches(*parts):
  """Batches of 3: (features, labels, mask), logits twice the features."""
  for f, y, mask in parts:
    f = jnp.array(f, jnp.float32)[:, None]
    z = jnp.concatenate([2 * f, -f], axis=1)
    batch = Batch(None, jnp.array(y), jnp.array(mask, bool), None)
    yield (f, z), batch


PASSES = (
    ([1.0, 2.0, 9.0], [0, 1, 1], [1, 1, 0]),
    ([3.0, 4.0, 5.0], [0, 0, 1], [1, 1, 1]),
)


def recorded(num_features):
  record = empty_record(2, 1, num_features)
  for outputs, batch in batches(*PASSES):
    record = jax.jit(add_batch)(record, outputs, batch)
  assert isinstance(record, Record)
  return make_upload(record)


def test_felo_sends_means_and_numbers_of_all_passes():
  uplink = recorded(None)
  assert uplink.kept.present.tolist() == [True, True]
  close(uplink.kept.value.vectors, [[8 / 3], [3.5]])
  assert uplink.kept.value.counts.tolist() == [3, 2]
  close(uplink.summed.value, [[16 / 3, -8 / 3], [7, -3.5]])
  assert uplink.summed.present.tolist() == [1, 1]


@pytest.mark.parametrize(
    ('num_features', 'want', 'labels'),
    [
        (7, [1, 2, 3, 4, 5, 0, 0], [0, 1, 0, 0, 1]),
        (5, [1, 2, 3, 4, 5], [0, 1, 0, 0, 1]),
        (3, [3, 4, 5], [0, 0, 1]),
        (4, [2, 3, 4, 5], [1, 0, 0, 1]),
    ],
)
def test_velo_sends_the_last_features_with_labels(num_features, want, labels):
  (f, y), present = recorded(num_features).kept
  assert f[:, 0].tolist() == want
  number = len(labels)
  assert y[:number].tolist() == labels
  assert present.tolist() == [i < number for i in range(num_features)]


# The CVAE.


def test_kl_by_hand():
  """0 for the standard normal; mu = [1, 0] gives 1/2 for each example."""
  zeros, mask = jnp.zeros((2, 2)), jnp.ones(2, bool)
  mu = jnp.array([[1.0, 0.0]] * 2)
  assert cvae.kl_loss(zeros, zeros, mask, 'sum') == 0
  assert cvae.kl_loss(mu, zeros, mask, 'sum') == 1.0
  assert cvae.kl_loss(mu, zeros, mask, 'mean') == 0.25
  half = jnp.array([True, False])
  assert cvae.kl_loss(mu, zeros, half, 'sum') == 0.5
  assert cvae.kl_loss(mu, zeros, half, 'mean') == 0.25
  # log sigma^2 = 1: (e - 1 - 1) / 2.
  got = cvae.kl_loss(jnp.zeros((1, 1)), jnp.ones((1, 1)), mask[:1], 'sum')
  close(got, (np.e - 2) / 2)


def test_size_of_the_papers_cvae():
  net = cvae.CVAE(1024, 10, 512)
  made = jax.eval_shape(lambda key: cvae.init_cvae(net, key), jax.random.key(0))
  assert made.stats == {}
  sizes = [leaf.size for leaf in jax.tree.leaves(made.params)]
  assert sum(sizes) == 6_303_744


def weights_of(variables):
  """The CVAE's parameters in the names of `felo_numpy`, float64."""
  names = dict(
      W1=('encoder_hidden', 'kernel'), b1=('encoder_hidden', 'bias'),
      g=('encoder_norm', 'scale'), b=('encoder_norm', 'bias'),
      W2=('encoder_output', 'kernel'), b2=('encoder_output', 'bias'),
      W3=('decoder_hidden', 'kernel'), b3=('decoder_hidden', 'bias'),
      W4=('decoder_output', 'kernel'), b4=('decoder_output', 'bias'),
  )  # fmt: skip
  params = jax.device_get(variables.params)
  found = {k: params[layer][leaf] for k, (layer, leaf) in names.items()}
  found['label'] = params['label']
  return {k: np.asarray(v, np.float64) for k, v in found.items()}


def fixed_noise(key, shape):
  """Equal rows, or different ones for a row per class."""
  del key
  rows = jnp.arange(shape[0]) if shape[0] == NUM_CLASSES else jnp.zeros(
      shape[0]
  )  # fmt: skip
  return jnp.linspace(-1.0, 1.0, shape[1])[None] + 0.5 * rows[:, None]


@pytest.mark.parametrize('reduction', ['sum', 'mean'])
def test_the_loss_of_the_cvae_and_its_gradient(reduction, monkeypatch):
  """Against the chain rule in NumPy; a masked row does not count."""
  monkeypatch.setattr(jax.random, 'normal', fixed_noise)
  net = cvae.CVAE(WIDTH, NUM_CLASSES, 2)
  variables = cvae.init_cvae(net, jax.random.key(0))
  rng = np.random.default_rng(0)
  x = rng.normal(size=(6, WIDTH)).astype(np.float32)
  y = rng.integers(0, NUM_CLASSES, 6).astype(np.int32)
  batch = Batch(jnp.array(x), jnp.array(y), jnp.arange(6) < 5, None)
  grads, (_, metrics) = jax.jit(
      jax.grad(cvae.cvae_loss(net, reduction), has_aux=True)
  )(variables, batch, jax.random.key(0))
  want, terms = felo_numpy.cvae_gradient(
      weights_of(variables), x[:5].astype(np.float64), y[:5],
      np.linspace(-1, 1, WIDTH), reduction == 'mean',
  )  # fmt: skip
  close([metrics['reconstruction_loss'], metrics['kl_loss']], terms)
  for name, got in weights_of(grads).items():
    close(got, want[name], err_msg=name)


# Whole rounds.


class Run(NamedTuple):
  """Some rounds of the library, and of `felo_numpy` in `want`."""

  federation: Federation
  algorithm: Any
  state: Any
  reports: list[dict[str, Any]]
  want: tuple[Any, ...]


ALPHA, RATE, ROUNDS = 2.0, 0.2, 6


def run(velo):
  """Two epochs of one step in a round; targets are sent from round 2 on."""
  local = tiny_local(optax.sgd, RATE, epochs=2, batch_size=8)
  federation = tiny_federation(
      (1, 2), norm=False, local=local, num_rounds=ROUNDS
  )
  options = dict(window=5)
  if velo:
    options = dict(
        velo=True, num_features=16, capacity=200, label_size=2,
        cvae_every=0.4, cvae_epochs=3, cvae_batch_size=600, cvae_lr=0.03,
    )  # fmt: skip
  algorithm = felo(federation, distill_weight=ALPHA, start=0.35, **options)
  # Client 0 has no example of class 0, nobody has one of class 2.
  data = tiny_data(SIZES)
  owner = np.repeat(np.arange(4), SIZES)
  labels = np.where(owner == 0, 1, np.arange(len(owner)) % 2)
  data = data.replace(labels=jnp.asarray(labels, jnp.int32))
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  reports = []
  for _ in range(ROUNDS):
    state, report = run_round(
        state, data, jax.random.key(1), jax.random.key(2)
    )
    reports.append(jax.device_get(report))
  nets, owned = nets_and_examples(federation, before.clients, data, SIZES)
  if velo:
    options = dict(velo=dict(
        w=weights_of(before.server.generator.variables),
        every=2,
        eps=np.linspace(-1, 1, WIDTH),
        draws=np.asarray(fixed_noise(None, (NUM_CLASSES, WIDTH)), np.float64),
        epochs=3,
        lr=0.03,
    ))  # fmt: skip
  want = felo_numpy.run(
      nets, owned, ROUNDS, first=2, alpha=ALPHA, lr=RATE, epochs=2, **options
  )
  return Run(federation, algorithm, jax.device_get(state), reports, want)


@pytest.mark.parametrize('velo', [False, True])
def test_rounds_are_those_of_the_paper(velo, monkeypatch):
  """Models, targets and losses. Velo trains after rounds 2, 4 and 6."""
  monkeypatch.setattr(jax.random, 'normal', fixed_noise)
  federation, algorithm, after, reports, want = run(velo)
  nets, targets, losses = want
  group_of, row_of = federation.places()
  sent = algorithm.downlink(after.server, federation.groups[0], VISIT)
  assert sent.present.tolist() == [True, True, False]
  assert sorted(targets) == [0, 1]
  for j, (f_bar, z_bar) in targets.items():
    close(sent.value.features[j], f_bar)
    close(sent.value.logits[j], z_bar)
  for k, net in enumerate(nets):
    group, row = federation.groups[group_of[k]], row_of[k]
    client = jax.tree.map(
        lambda leaf, row=row: leaf[row], after.clients[group.name]
    )
    for got, layer in zip(as_list(group.model, client.variables), net):
      close(got[0], layer[0])
      close(got[1], layer[1])
    for t in range(ROUNDS):
      metrics = reports[t][group.name].metrics
      names = ('cross_entropy', 'feature_loss', 'logit_loss')
      close([metrics[name][row] for name in names], losses[t, k])
      close(metrics['train_loss'][row], losses[t, k] @ [1, ALPHA, ALPHA])
  assert np.all(losses[:2, :, 1:] == 0) and np.all(losses[2:, :, 1:] > 0)


# Velo's server.


@functools.cache
def velo_server():
  """Ten rounds, sent from round 4 on, trained after every third.

  The third result is a jitted server update.
  """
  federation = two_groups(num_rounds=10)
  algorithm = felo(
      federation, velo=True, num_features=3, capacity=4, label_size=2,
      cvae_epochs=2, start=0.4, cvae_every=0.3,
  )  # fmt: skip

  @jax.jit
  def update(server, f, round_num, key, ends=True, ids=(0, 3)):
    """Client 0 sends f[0]; slots of client 3 are padding and hold anything."""

    def upload(ids, f):
      rows = f, jnp.zeros(f.shape[:2], jnp.int32)
      present = jnp.ones(f.shape[:2], bool)
      number = jnp.sum(ids < 3).astype(jnp.float32)
      summed = Maybe(jnp.ones((1, 1)) * number, number[None])
      return Received(summed, Maybe(rows, present), ids, round_ends=ends)

    received = dict(
        a=upload(jnp.stack(ids), f), b=upload(jnp.array([3]), f[:1])
    )
    return algorithm.server_update(server, received, Turn(round_num, key))

  return federation, algorithm, update


FEATURES = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
KEYS = jax.random.key(1), jax.random.key(2)


def test_velos_targets_are_shared_in_a_step_and_differ_between_steps():
  federation, algorithm, update = velo_server()
  server = algorithm.init(jax.random.key(0))

  def sent(server, client=0, key=1):
    visit = Visit(jnp.int32(client), jnp.int32(4), jax.random.key(key))
    return jax.device_get(
        algorithm.downlink(server, federation.groups[0], visit)
    )

  assert not sent(server).present.any()
  first, metrics = update(server, FEATURES, 3, KEYS[0])
  assert all(np.isfinite(value) for value in metrics.values())
  same, _ = update(server, FEATURES, 3, KEYS[0])
  jax.tree.map(np.testing.assert_array_equal, first, same)
  assert sent(first).present.tolist() == [True]
  a, b = (sent(first, client, client) for client in (0, 2))
  jax.tree.map(np.testing.assert_array_equal, a, b)
  # A server update that neither stores nor trains draws new noise.
  other, _ = update(first, FEATURES, 3, KEYS[1], False, (3, 3))
  jax.tree.map(
      np.testing.assert_array_equal,
      (other.store, other.logits, other.generator.variables),
      (first.store, first.logits, first.generator.variables),
  )
  assert np.abs(sent(other).value.features - a.value.features).max() > 1e-3


def test_velo_stores_the_last_features():
  _, algorithm, update = velo_server()
  server = algorithm.init(jax.random.key(0))
  first, _ = update(server, FEATURES, 0, KEYS[0])
  assert first.store.size.tolist() == [3]
  second, _ = update(first, FEATURES + 20, 1, KEYS[0])
  assert second.store.size.tolist() == [4]
  rows = np.asarray(second.store.rows[0])
  assert sorted(rows[:, 0].tolist()) == [4, 20, 22, 24]


def test_when_the_cvae_is_trained():
  """Only at the end of a round."""
  federation, algorithm, update = velo_server()
  server, found = algorithm.init(jax.random.key(0)), []
  for t in range(10):
    mid, metrics = update(server, FEATURES, t, KEYS[0], False)
    assert np.isnan(metrics['cvae_loss'])
    jax.tree.map(
        np.testing.assert_array_equal,
        mid.generator.variables,
        server.generator.variables,
    )
    server, metrics = update(mid, FEATURES, t, KEYS[0])
    if np.isfinite(metrics['cvae_loss']):
      found.append(t + 1)
    assert server.generator.features.present.tolist() == [t + 1 >= 4]
    visit = VISIT._replace(round_num=jnp.int32(t + 1))
    sent = algorithm.downlink(server, federation.groups[0], visit)
    assert sent.present.tolist() == [t + 1 >= 4]
  assert found == [4, 7, 10]


def test_a_server_without_features_does_not_train():
  _, algorithm, update = velo_server()
  server = algorithm.init(jax.random.key(0))
  after, metrics = update(server, FEATURES, 3, KEYS[0], True, (3, 3))
  jax.tree.map(np.testing.assert_array_equal, after.store, server.store)
  assert np.isnan(metrics['cvae_loss'])
  assert not after.generator.features.present.any()


# What travels, and what is refused.


def test_bytes_of_the_papers_setting():
  """d = 1024, C = 10, ten minibatches of 50."""
  local = tiny_local(batch_size=50, steps=10)
  federation = one_group(net_of(1024, 10), 2, local=local)
  (group,), data = federation.groups, tiny_data((1000, 900))
  down, up = bytes_of_a_visit(felo(federation), group, data)
  # Up, ten numbers of examples more than the spec's 10,340.
  assert (down, up) == (4 * 10_340, 4 * 10_350)
  down, up = bytes_of_a_visit(felo(federation, velo=True), group, data)
  # Up, 500 labels more.
  assert (down, up) == (4 * 10_340, 4 * 512_600)


def test_nothing_is_sent_before_the_start():
  federation = tiny_federation((1,), num_rounds=200)
  algorithm, group = felo(federation), federation.groups[0]
  server = algorithm.init(jax.random.key(0))
  server = jax.tree.map(jnp.ones_like, server)
  for round_num in (9, 10):
    visit = VISIT._replace(round_num=jnp.int32(round_num))
    sent = algorithm.downlink(server, group, visit)
    assert sent.present.tolist() == [round_num >= 10] * NUM_CLASSES


def test_expected_share_of_velos_features():
  federation = tiny_federation((1,), local=tiny_local(epochs=3))
  algorithm = felo(federation, velo=True, num_features=20)
  down, up = algorithm.sent_shares(federation.groups[0], np.array([4, 8, 2]))
  assert down == 1.0 and up.tolist() == [12 / 20, 1.0, 6 / 20]
  assert felo(federation).sent_shares is None


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(logit_loss='l1'), "^Unknown logit_loss 'l1'"),
        (dict(kl_reduction='none'), "^Unknown kl_reduction 'none'"),
        (dict(distill_weight=-1.0), 'distill_weight must be at least 0'),
        (dict(start=1.5), 'start must be at least 0 and at most 1'),
        (dict(cvae_every=-0.1), 'cvae_every must be at least 0'),
        (dict(window=0), 'window must be at least 1, got 0'),
        (dict(capacity=0), 'capacity must be at least 1, got 0'),
        (dict(cvae_lr=0.0), 'cvae_lr must be above 0'),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    felo(tiny_federation((1,)), **options)


def test_features_of_different_widths_are_refused():
  groups = tuple(
      Group(f'w{width}', tiny_model(1, width=width), np.array([i]))
      for i, width in enumerate((4, 5))
  )
  with pytest.raises(ValueError, match=r'felo needs .* w4 has 4 and w5 has 5'):
    felo(Federation(groups, tiny_local()))
