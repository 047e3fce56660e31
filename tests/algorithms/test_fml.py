"""FML: its losses by hand, its limits, and a round in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fedavg, fml, private
from fedjax_het.algorithms.fml import memes_of, mutual_losses
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Visit
from fedjax_het.models import create
from fedjax_het.models.blocks import Variables
from tests.quadratics import play
from tests.tiny import (
    NUM_CLASSES,
    SHAPE,
    bytes_of_a_visit,
    tiny_data,
    tiny_federation,
    tiny_local,
    tiny_model,
)
from tests.trees import assert_trees

Z, U = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])
LABEL = jnp.array([0])


def losses(z, u, labels=LABEL, mask=None, alpha=0.5, beta=0.5):
  return mutual_losses(CLASSIFICATION, z, u, labels, mask, alpha, beta)


def test_losses_by_hand():
  """KL of both ways is 0.462117."""
  np.testing.assert_allclose(losses(Z, U), (0.387689, 0.887689), atol=2e-6)
  # alpha = 1/4, beta = 3/4: CE is 0.313262 and 1.313262.
  want = (
      0.25 * 0.313262 + 0.75 * 0.462117,
      0.75 * 1.313262 + 0.25 * 0.462117,
  )
  got = losses(Z, U, alpha=0.25, beta=0.75)
  np.testing.assert_allclose(got, want, atol=2e-6)


def test_each_kl_has_its_own_direction():
  """p = (3/4, 1/4), q = (1/2, 1/2): KL(q || p) and KL(p || q)."""
  z, u = jnp.log(jnp.array([[3.0, 1.0]])), jnp.zeros((1, 2))
  q_p = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)
  p_q = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
  np.testing.assert_allclose(
      losses(z, u, alpha=0.0, beta=0.0), (q_p, p_q), atol=1e-6
  )


def test_no_loss_has_a_gradient_in_its_teacher():
  of_private, of_meme = (
      jax.grad(lambda pair, i=i: losses(*pair)[i])((Z, U)) for i in (0, 1)
  )
  assert not np.any(of_private[1]) and not np.any(of_meme[0])
  # d L_w / d z = alpha (p - y) + (1 - alpha) (p - q).
  p, q = jax.nn.softmax(Z), jax.nn.softmax(U)
  y = jnp.array([[1.0, 0.0]])
  want = 0.5 * (p - y) + 0.5 * (p - q), 0.5 * (q - y) + 0.5 * (q - p)
  np.testing.assert_allclose(of_private[0], want[0], atol=1e-6)
  np.testing.assert_allclose(of_meme[1], want[1], atol=1e-6)


def test_padding_counts_in_no_loss():
  z, u = jnp.concatenate([Z, 5 * U]), jnp.concatenate([U, 7 * Z])
  got = losses(z, u, jnp.array([0, 1]), jnp.array([True, False]))
  np.testing.assert_allclose(got, losses(Z, U), rtol=1e-6)


def two_depths(**local):
  """Clients 0 and 2 of a shallow net, 1 and 3 of a deep one; no norms."""
  federation = tiny_federation((1, 2), norm=False, local=tiny_local(**local))
  return federation, tiny_data((8, 5, 6, 7))


def play_on(algorithm, federation, data, cohorts=((0, 1, 2, 3), (0, 1, 3))):
  """The server's state and {client id: its state} after all rounds."""
  *_, last = play(algorithm, federation, data, cohorts)
  return jax.device_get(last)


def test_equal_models_stay_equal_and_learn_a_share_of_the_labels():
  """KL is 0, and the gradient is alpha times that of the labels."""
  federation, data = two_depths(tx=optax.sgd, lr=0.2)
  group, visit = federation.groups[0], Visit(0, 0, jax.random.key(3))
  algorithm, alone = fml(federation, alpha=0.25, beta=0.25), private(
      dataclasses.replace(federation, local=tiny_local(optax.sgd, 0.05))
  )
  client = algorithm.init_client(group, 0, jax.random.key(5))
  after, uplink, _ = jax.jit(
      functools.partial(algorithm.client_update, group)
  )(client, client.private, data.client(0), visit)
  moved = jax.tree.map(
      jnp.subtract, after.private.params, client.private.params
  )
  assert_trees(moved, uplink.summed.change, rtol=1e-5)
  (want, _), _, _ = jax.jit(functools.partial(alone.client_update, group))(
      (client.private, None), (), data.client(0), visit
  )
  assert_trees(after.private, want, rtol=2e-5)


@pytest.mark.parametrize('keep', [True, False])
def test_with_labels_alone_it_is_private_and_fedavg(keep):
  """alpha = beta = 1; only the private model's momentum may be kept."""
  federation, data = two_depths(keep_optimizer=keep)
  forgets = dataclasses.replace(federation.local, keep_optimizer=False)
  memes = dataclasses.replace(memes_of(federation), local=forgets)
  mean = fedavg(memes)
  # They begin with equal memes.
  mean = mean._replace(init=fml(federation).init)
  both = play_on(fml(federation, alpha=1.0, beta=1.0), federation, data)
  _, alone = play_on(private(federation), federation, data)
  assert_trees(both[0], play_on(mean, memes, data)[0], rtol=2e-5, atol=1e-7)
  for i, (model, opt_state) in alone.items():
    assert_trees(both[1][i].private, model, rtol=2e-5, atol=1e-7)
    assert (both[1][i].opt_state is not None) is keep
    assert_trees(both[1][i].opt_state, opt_state, rtol=2e-5, atol=1e-7)


def forward(weights, x):
  """Logits of a dense ReLU net, and the inputs of its layers."""
  inputs = []
  for i, layer in enumerate(weights):
    x = np.maximum(x, 0) if i else x
    inputs.append(x)
    x = x @ layer['kernel'] + layer['bias']
  return x, inputs


def backward(weights, inputs, d):
  """The gradient in all weights, from that in the logits."""
  grads = []
  for layer, x in zip(weights[::-1], inputs[::-1], strict=True):
    grads.insert(0, dict(kernel=x.T @ d, bias=d.sum(axis=0)))
    d = (d @ layer['kernel'].T) * (x > 0)
  return grads


def softmax(z):
  e = np.exp(z - z.max(axis=1, keepdims=True))
  return e / e.sum(axis=1, keepdims=True)


def descend(weights, grads, velocity, rate=0.1, momentum=0.9):
  """A step of SGD with momentum, in place."""
  for layer, change, speed in zip(weights, grads, velocity, strict=True):
    for name in layer:
      speed[name] = momentum * speed[name] + change[name]
      layer[name] = layer[name] - rate * speed[name]


def still(weights):
  return [{name: 0 * leaf for name, leaf in w.items()} for w in weights]


def oracle_round(meme, clients, cohort, data, alpha, beta, steps=2):
  """Algorithm 1 on full batches; `clients` hold weights and velocity."""
  returned = []
  for i in cohort:
    x, y = data[i]
    y = np.eye(NUM_CLASSES)[y]
    w, speed = clients[i]
    g = [dict(layer) for layer in meme]
    meme_speed = still(g)
    for _ in range(steps):
      z, of_w = forward(w, x)
      u, of_g = forward(g, x)
      p, q = softmax(z), softmax(u)
      # alpha CE + (1 - alpha) KL(q || p), and the other way around.
      dz = (alpha * (p - y) + (1 - alpha) * (p - q)) / len(x)
      du = (beta * (q - y) + (1 - beta) * (q - p)) / len(x)
      descend(w, backward(w, of_w, dz), speed)
      descend(g, backward(g, of_g, du), meme_speed)
    returned.append(g)
  return [
      {name: np.mean([g[j][name] for g in returned], axis=0) for name in layer}
      for j, layer in enumerate(meme)
  ]


def layers(variables):
  """The layers of a tiny net, in order, in float64."""
  names = ['stem', *sorted(n for n in variables.params if 'mid' in n), 'head']
  return [
      {k: np.float64(v) for k, v in variables.params[n]['Dense_0'].items()}
      for n in names
  ]


def test_two_rounds_in_numpy():
  """Private models of two depths with momentum, and a client that is away."""
  federation, data = two_depths(lr=0.1, batch_size=8)
  algorithm, key = fml(federation, alpha=0.3, beta=0.6), jax.random.key(0)
  meme = layers(algorithm.init(key))
  clients = {}
  for group in federation.groups:
    for i in group.client_ids.tolist():
      weights = layers(algorithm.init_client(group, i, key).private)
      clients[i] = weights, still(weights)
  examples = {}
  for i in range(4):
    one, n = data.client(i), int(data.sizes[i])
    batch = one.batch(jnp.arange(n))
    x = np.asarray(batch.x, np.float64).reshape(n, -1)
    examples[i] = x, np.asarray(batch.y)
  cohorts = (0, 1, 2, 3), (0, 1, 3)
  for cohort in cohorts:
    meme = oracle_round(meme, clients, cohort, examples, 0.3, 0.6)
  server, states = play_on(algorithm, federation, data, cohorts)
  close = functools.partial(assert_trees, rtol=1e-4, atol=1e-6)
  close(layers(server), meme)
  for i, (weights, _) in clients.items():
    close(layers(states[i].private), weights)


def test_evaluated_are_the_private_model_and_the_meme():
  federation, data = two_depths()
  algorithm, key = fml(federation), jax.random.key(0)
  server, group = algorithm.init(key), federation.groups[1]
  client = algorithm.init_client(group, 1, key)
  pair = algorithm.client_model(server, client, group)
  x = data.client(1).batch(jnp.arange(5)).x
  np.testing.assert_array_equal(
      algorithm.predict(group, pair, x), group.model.apply(client.private, x)[0]
  )
  # The shallow net is the meme of both groups.
  shallow = federation.groups[0].model
  meme = Variables(*server)
  np.testing.assert_array_equal(
      algorithm.views['meme'](group, pair, x), shallow.apply(meme, x)[0]
  )
  other = algorithm.init_client(federation.groups[0], 0, key).private
  assert not np.array_equal(
      meme.params['stem']['Dense_0']['kernel'],
      other.params['stem']['Dense_0']['kernel'],
  )


def test_a_message_has_the_size_of_the_meme_whatever_the_model():
  """The uplink adds the coefficient."""
  federation, data = two_depths()
  size = 4 * federation.groups[0].model.num_params
  for i, group in enumerate(federation.groups):
    sizes = bytes_of_a_visit(fml(federation), group, data, i)
    assert sizes == (size, size + 4)


def test_the_meme_may_be_chosen():
  federation, _ = two_depths()
  small = tiny_model(1, width=2, norm=False)
  chosen = dataclasses.replace(federation, server_model=small)
  assert all(group.model == small for group in memes_of(chosen).groups)
  meme = jax.eval_shape(fml(chosen).init, jax.random.key(0))
  assert meme.params['stem']['Dense_0']['bias'].shape == (2,)


@pytest.mark.parametrize(
    ('shape', 'classes', 'what'),
    [(SHAPE, NUM_CLASSES + 1, 'num_classes'), ((3, 3, 1), 3, 'input_shape')],
)
def test_a_meme_that_does_not_fit_is_refused(shape, classes, what):
  odd = create('mlp', shape, classes, hidden=4)
  federation = dataclasses.replace(two_depths()[0], server_model=odd)
  with pytest.raises(ValueError, match=f"{what} of the shared .* of 'tiny1'"):
    fml(federation)


@pytest.mark.parametrize('option', ['alpha', 'beta'])
def test_options_out_of_range_are_refused(option):
  federation, _ = two_depths()
  for value in (-0.1, 1.1):
    with pytest.raises(ValueError, match=option):
      fml(federation, **{option: value})


def test_statistics_stay_on_the_client_if_asked():
  """The private model's and the meme's; else the meme's are averaged."""
  federation = tiny_federation((1, 2), local_stats=True, local=tiny_local())
  data, key = tiny_data((8, 5, 6, 7)), jax.random.key(0)
  algorithm, group = fml(federation), federation.groups[1]
  assert not jax.tree.leaves(algorithm.init(key).stats)
  server, clients = play_on(algorithm, federation, data, [(0, 1, 2, 3)])
  one, two = clients[1].meme, clients[3].meme
  assert jax.tree.leaves(one.stats) and not jax.tree.leaves(one.params)
  assert any(map(np.any, jax.tree.leaves(
      jax.tree.map(np.subtract, one.stats, two.stats)
  )))  # fmt: skip
  _, meme = algorithm.client_model(server, clients[1], group)
  assert_trees(meme.stats, one.stats, rtol=0)
