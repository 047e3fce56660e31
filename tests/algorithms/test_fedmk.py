"""FedMK by hand, and against NumPy over two rounds."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fedmk
from fedjax_het.algorithms.fedmk.condense import (
  Setting,
  clip_to_inputs,
  dynamic_weights,
  outer_loss,
)
from fedjax_het.algorithms.fedmk.sets import (
  Learned,
  draw_from_others,
  labels_of,
  union_of,
)
from fedjax_het.data.federated import Batch
from fedjax_het.engine import traffic
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Turn,
  Visit,
)
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel, Variables
from tests.algorithms import fedmk_numpy
from tests.algorithms.suite import Case
from tests.tiny import NUM_CLASSES, SHAPE, tiny_data, tiny_local, tiny_model

# For the shared tests, see `tests/algorithms/suite.py`.
SUITE = [Case(dict(per_class=2, server_epochs=2))]
SIZES = (5, 8, 3, 7)
NUM, P = len(SIZES), 2
LABELS = (
    *(0, 1, 2, 1, 0), *(0, 0, 1, 2, 2, 1, 0, 2), *(1, 1, 0),
    *(2, 2, 1, 1, 2, 1, 1),
)  # fmt: skip
OWNED = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]], bool)
OPTIONS = dict(
    per_class=P, inner_lr=0.5, condense_lr=8.0, tau=2.0, server_epochs=3,
    server_batch_size=64,
)  # fmt: skip
STEPS, LR = 3, 0.2
KEYS = jax.random.split(jax.random.key(5), 2)


def data_of():
  return tiny_data(SIZES).replace(labels=jnp.array(LABELS, jnp.int32))


@functools.cache
def federate(steps=STEPS):
  """Four clients in two groups of one net with norms; whole batches."""
  model = tiny_model(1)
  groups = tuple(
      Group(name, model, np.arange(2) * 2 + i) for i, name in enumerate('ab')
  )
  return Federation(
      groups, tiny_local(optax.sgd, LR, steps=steps, batch_size=8)
  )


@functools.cache
def visit_of(steps=STEPS):
  """`(server, client id, key) -> (downlink, uplink, metrics)`, jitted."""
  federation = federate(steps)
  algorithm, data = fedmk(federation, **OPTIONS), data_of()
  group = federation.groups[0]

  @jax.jit
  def run(server, i, key):
    visit = Visit(i, jnp.int32(0), jax.random.fold_in(key, i))
    sent = algorithm.downlink(server, group, visit)
    _, uplink, metrics = algorithm.client_update(
        group, (), sent, data.client(i), visit
    )
    return sent, uplink, metrics

  return run


@functools.cache
def update_of():
  """`(server, received) -> (server, metrics)`, jitted."""
  algorithm = fedmk(federate(), **OPTIONS)
  turn = Turn(jnp.int32(0), jax.random.key(7))
  return jax.jit(lambda *args: algorithm.server_update(*args, turn))


@functools.cache
def first_server():
  return jax.device_get(fedmk(federate(), **OPTIONS).init(jax.random.key(0)))


def visits(server, key, steps=STEPS, ids=range(NUM)):
  run = visit_of(steps)
  return [jax.device_get(run(server, jnp.int32(i), key)) for i in ids]


def receive(kept, ids):
  """{group: Received} of uploads of the clients `ids`."""
  found = {}
  for group in federate().groups:
    mine = [row for row, i in enumerate(ids) if i in group.client_ids]
    rows = [kept[row] for row in mine]
    padding = jax.tree.map(lambda a: np.full_like(a, 1), kept[0])
    rows += [padding] * (2 - len(rows))
    found[group.name] = Received(
        (), jax.tree.map(lambda *leaves: np.stack(leaves), *rows),
        np.array([*(ids[row] for row in mine), *[NUM] * (2 - len(mine))],
                 np.int32),
    )  # fmt: skip
  return found


@functools.cache
def two_rounds():
  """[(server, visits)] before each of two rounds, and the last server.

  Client 3 is not in the first round.
  """
  server, found, losses = first_server(), [], []
  for key, ids in zip(KEYS, (range(3), range(4)), strict=True):
    made = visits(server, key, ids=ids)
    found.append((server, made))
    received = receive([uplink.kept for _, uplink, _ in made], list(ids))
    server, metrics = jax.device_get(update_of()(server, received))
    losses.append(metrics['server_loss'])
  return found, server, losses


# Closed forms.


class Line(nn.Module):
  """x -> w x."""

  @nn.compact
  def __call__(self, x, train, mask):
    return self.param('w', nn.initializers.zeros, ()) * x


class Flat(nn.Module):
  """[B, ...] -> [B, 1]."""

  @nn.compact
  def __call__(self, x, train, mask):
    return x.reshape(len(x), 1)


LINE = BlockModel(
    'line',
    (Block('stem', Flat()), Block('middle', Flat()), Block('head', Line())),
    (1, 1, 1),
    1,
    (1, 2),
)
SQUARES = Task(
    'squares',
    lambda out, y: 0.5 * (out[:, 0] - y.astype(jnp.float32)) ** 2,
    {},
)


def line_loss(
    x_hat, real_x, real_y, mask, tau=1.0, y_hat=1, task=SQUARES
):
  """The outer loss of one learned example of the line, with eta_in 0.5."""
  start = Variables(
      {'stem': {}, 'middle': {}, 'head': {'w': jnp.float32(0)}}, {}
  )
  fn = outer_loss(LINE, task, Setting(0.5, 1.0, tau), start)
  batch = Batch(
      jnp.reshape(jnp.array(real_x, jnp.float32), (-1, 1, 1, 1)),
      jnp.array(real_y), jnp.array(mask), None,
  )  # fmt: skip
  x = jnp.reshape(x_hat, (1, 1, 1, 1))
  return fn(
      x, jnp.array([y_hat]), jnp.ones(1, bool), batch, jax.random.key(0)
  )


def test_the_gradient_goes_through_the_inner_step():
  """w = 0, (x^, y^) = (1, 1): w' = 0.5; outer loss 0.125, gradient -0.25."""
  (loss, metrics), grad = jax.jit(
      jax.value_and_grad(
          lambda x: line_loss(x, [1.0], [1], [True]), has_aux=True
      )
  )(jnp.float32(1))
  np.testing.assert_allclose(
      [loss, grad, metrics['train_loss'], metrics['learned_loss']],
      [0.125, -0.25, 0.125, 0.5],
      rtol=1e-6,
  )


def test_both_losses_have_the_tasks_change_of_outputs():
  """Doubled outputs: w' = 1, and the real example has the output 2."""
  task = SQUARES._replace(before_loss=lambda out, y, mask: 2 * out)
  loss, _ = line_loss(jnp.float32(1), [1.0], [1], [True], task=task)
  np.testing.assert_allclose(loss, 0.5, rtol=1e-6)


def test_weights_are_constant_and_padding_does_not_count():
  """Two real examples, (1, 1) and (1, 3), and one of padding."""
  tau = 1.5
  grad = jax.jit(jax.grad(
      lambda x: line_loss(
          x, [1.0, 1.0, 9.0], [1, 3, 2], [True, True, False], tau
      )[0]
  ))(jnp.float32(1))  # fmt: skip
  # w' = 0.5 and dw'/dx^ = 0.5; gaps w' - y of the two.
  gaps = np.array([-0.5, -2.5])
  phi = 1 / (1 + np.exp(-tau * 0.5 * gaps**2))
  want = np.mean(phi / phi.mean() * gaps * 0.5)
  np.testing.assert_allclose(grad, want, rtol=1e-5)


@pytest.mark.parametrize('tau', [0.0, 5.0, -2.0])
def test_dynamic_weights(tau):
  losses = jnp.array([0.1, 2.0, 0.5, jnp.nan])
  mask = jnp.array([True, True, True, False])
  phi = np.asarray(dynamic_weights(losses, mask, tau))
  sigmoid = 1 / (1 + np.exp(-tau * np.array([0.1, 2.0, 0.5])))
  np.testing.assert_allclose(phi[:3], sigmoid / sigmoid.mean(), rtol=1e-5)
  assert phi[3] == 0
  if tau == 0:
    np.testing.assert_array_equal(phi[:3], 1)
  np.testing.assert_allclose(dynamic_weights(losses[:3], None, tau), phi[:3])


def test_weights_of_large_losses_do_not_underflow():
  losses = jnp.array([100.0, 101.0])
  phi = dynamic_weights(losses, None, -5.0)
  np.testing.assert_allclose(phi, [2 / (1 + np.exp(-5)),
                                   2 / (1 + np.exp(5))], rtol=1e-4)  # fmt: skip
  assert not np.any(dynamic_weights(losses, jnp.zeros(2, bool), 1.0))


# What the server stores, draws and trains on.


def table(present):
  """Sets of inputs of one number, which names client, class and place."""
  present = jnp.array(present)
  k, c = present.shape
  x = jnp.arange(k * c * P, dtype=jnp.float32).reshape(k, c, P, 1)
  y = jnp.broadcast_to(labels_of(c, P)[None], (k, c, P))
  return Maybe(Learned(x, y), present)


def test_others_examples_of_known_labels_are_drawn_without_replacement():
  sets = table([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0]])
  sets = sets._replace(present=sets.present.astype(bool))
  draw = jax.jit(draw_from_others)
  drawn = set()
  for seed in range(20):
    (x, y), present = jax.device_get(
        draw(sets, jnp.int32(0), jax.random.key(seed))
    )
    # Nobody else has class 1; class 2 is not among the labels of client 0.
    assert present.tolist() == [True, False, False]
    assert y[0].tolist() == [0, 0]
    # Class 0 of the clients 1 and 2: numbers 6, 7 and 12, 13.
    assert set(x[0, :, 0]) <= {6, 7, 12, 13} and len(set(x[0, :, 0])) == P
    drawn.add(tuple(x[0, :, 0]))
  assert len(drawn) > 5
  # A client that has sent nothing is sent all labels.
  (x, y), present = draw(sets, jnp.int32(3), jax.random.key(0))
  assert present.tolist() == [True] * 3
  assert y.tolist() == [[0, 0], [1, 1], [2, 2]]
  assert set(x[1, :, 0].tolist()) == {2, 3}
  assert set(x[2, :, 0].tolist()) == {16, 17}


def test_the_union_has_what_was_sent_and_nothing_else():
  data = union_of(table([[False, True], [False, False], [True, True]]))
  assert int(data.size) == 6 and data.length == 12
  batch = data.batch(jnp.arange(6))
  assert batch.x.ravel().tolist() == [2, 3, 8, 9, 10, 11]
  assert batch.y.tolist() == [1, 1, 0, 0, 1, 1]


# Visits.


def test_without_a_step_the_upload_is_the_initialisation():
  """Received examples, and noise, clipped, where there are none."""
  server, _ = two_rounds()[0][1]
  for i, (sent, uplink, _) in enumerate(visits(server, KEYS[1], steps=0)):
    (x, y), present = uplink.kept
    np.testing.assert_array_equal(present, OWNED[i])
    np.testing.assert_array_equal(y, labels_of(NUM_CLASSES, P))
    received, there = sent.start
    np.testing.assert_array_equal(there, OWNED[i] | (i == 3))
    np.testing.assert_array_equal(x[there], received.x[there])
  rows = [uplink.kept.value.x for _, uplink, _ in visits(
      first_server(), KEYS[0], steps=0)]  # fmt: skip
  noise = np.stack(rows)
  assert np.abs(noise).max() == 1 and 0.2 < np.mean(np.abs(noise) == 1) < 0.45
  assert len(np.unique(noise)) > 0.5 * noise.size
  np.testing.assert_allclose(noise.mean(), 0, atol=0.2)


def as_numpy(variables):
  """Parameters and statistics as `fedmk_numpy` has them, and the blocks."""
  params, stats = variables
  names = [block.name for block in federate().groups[0].model.blocks]
  p, s = {}, {}
  for name in names:
    for leaf in ('kernel', 'bias'):
      p[name, leaf] = np.float64(params[name]['Dense_0'][leaf])
    if name in stats:
      norm = params[name]['BatchNorm_0']
      p[name, 'scale'] = np.float64(norm['scale'])
      p[name, 'shift'] = np.float64(norm['bias'])
      running = stats[name]['BatchNorm_0']
      s[name] = np.float64(running['mean']), np.float64(running['var'])
  return p, s, names


def test_two_rounds_are_those_of_the_paper():
  found, last, server_losses = two_rounds()
  data = jax.device_get(data_of())
  servers = [server for server, _ in found][1:] + [last]
  stored = {}
  for (server, made), after, loss, key, ids in zip(
      found, servers, server_losses, KEYS, (range(3), range(4)), strict=True
  ):
    p, s, names = as_numpy(server.model)
    starts = visits(server, key, steps=0, ids=ids)
    for i, (_, uplink, metrics), (_, start, _) in zip(ids, made, starts):
      owned = OWNED[i]
      mine = data.index[i, : SIZES[i]]
      real = np.float64(data.images[mine]) / 127.5 - 1, data.labels[mine]
      x = np.float64(start.kept.value.x[owned])
      y = np.repeat(np.flatnonzero(owned), P)
      want, want_losses = fedmk_numpy.condense(
          p, names, x.reshape(-1, *SHAPE), y, real, STEPS,
          OPTIONS['inner_lr'], OPTIONS['condense_lr'], OPTIONS['tau'],
      )  # fmt: skip
      np.testing.assert_array_equal(uplink.kept.present, owned)
      got = uplink.kept.value.x[owned].reshape(want.shape)
      np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
      # The examples are learned, and some are clipped.
      assert np.abs(want - x.reshape(want.shape)).max() > 0.05
      np.testing.assert_allclose(
          [metrics['train_loss'], metrics['learned_loss']],
          want_losses, rtol=1e-3,
      )  # fmt: skip
      stored[i] = got, y
    xs, ys = (np.concatenate(part) for part in zip(*stored.values()))
    p, s = fedmk_numpy.train(
        p, s, names, np.float64(xs), ys, OPTIONS['server_epochs'], LR
    )
    got_p, got_s, _ = as_numpy(after.model)
    for got, want in ((got_p, p), (got_s, s)):
      assert got.keys() == want.keys()
      for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=2e-3, atol=2e-4)
    assert 0 < loss < 5


def test_what_travels():
  """Up the own labels; down w, and others' examples of those labels."""
  (_, first), (_, second) = two_rounds()[0]
  of_class = P * (4 + 1) * 4
  of_w = 4 * federate().groups[0].model.num_params + 4 * 4 * 4
  for i, (sent, uplink, _) in enumerate(first):
    up = traffic.num_bytes(traffic.measure(uplink))
    assert up == of_class * OWNED[i].sum()
    assert traffic.num_bytes(traffic.measure(sent)) == of_w
  for i, (sent, _, _) in enumerate(second):
    # Client 3 is visited for the first time.
    labels = 3 if i == 3 else OWNED[i].sum()
    down = traffic.num_bytes(traffic.measure(sent))
    assert down == of_w + of_class * labels


# The server.


def test_the_server_depends_on_the_uploads_alone():
  """Their order and their senders, padding and groups change nothing."""
  server = first_server()
  kept = [uplink.kept for _, uplink, _ in two_rounds()[0][0][1]]
  one = update_of()(server, receive(kept, [0, 1, 2]))[0]
  other = update_of()(server, receive(kept[::-1], [3, 0, 1]))[0]
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
      one.model, other.model,
  )  # fmt: skip
  assert one.sets.present.tolist() == [*OWNED[:3].tolist(), [False] * 3]


def test_without_any_upload_the_server_keeps_its_model():
  server = first_server()
  kept = jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), server.sets)
  after, metrics = update_of()(server, receive([kept], [NUM]))
  jax.tree.map(np.testing.assert_array_equal, after, server)
  assert np.isnan(metrics['server_loss'])


# The rest.


def test_only_pixels_are_clipped():
  data = data_of().client(0)
  x = jnp.full((1, 1, *SHAPE), 3.0)
  assert np.all(clip_to_inputs(x, data) == 1)
  assert np.all(clip_to_inputs(-x, data) == -1)
  data = data.replace(images=data.images.astype(jnp.float32))
  assert np.all(clip_to_inputs(x, data) == 3)


def test_convolutions_of_another_library_have_no_second_derivative():
  """Clients use XLA's, whatever the model asks for."""
  model = create('mini_resnet6', (8, 8, 1), 3, conv_backend='onednn')
  federation = Federation((Group('a', model, np.arange(2)),), tiny_local())
  algorithm = fedmk(federation, per_class=1)
  data = tiny_data((4, 4))
  data = data.replace(images=jnp.zeros((8, 8, 8, 1), jnp.uint8))

  def visit(key):
    (group,), server = federation.groups, algorithm.init(key)
    visit = Visit(jnp.int32(0), jnp.int32(0), key)
    sent = algorithm.downlink(server, group, visit)
    return algorithm.client_update(group, (), sent, data.client(0), visit)

  _, uplink, _ = jax.eval_shape(visit, jax.random.key(0))
  assert uplink.kept.value.x.shape == (3, 1, 8, 8, 1)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(per_class=0), 'per_class must be at least 1'),
        (dict(inner_lr=-1.0), 'inner_lr must be at least 0'),
        (dict(condense_lr=0.0), 'condense_lr must be above 0'),
        (dict(tau=float('nan')), 'tau must be a finite number'),
        (dict(server_epochs=0), 'server_epochs must be at least 1'),
        (dict(server_batch_size=0), 'server_batch_size must be at least 1'),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    fedmk(federate(), **options)


def test_token_ids_are_refused():
  model = create('text', (5,), 3, vocabulary=9, width=0.25)
  federation = Federation((Group('t', model, np.arange(2)),), tiny_local())
  with pytest.raises(ValueError, match='token ids'):
    fedmk(federation)
