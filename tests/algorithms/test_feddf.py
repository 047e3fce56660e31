"""FedDF: the ensemble by hand, FedAvg as a limit, and a round in NumPy."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.ensemble_distillation import (
  server_training,
  student_loss,
)
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.teachers import teacher_logits
from fedjax_het.algorithms import fedavg
from fedjax_het.algorithms import feddf as make
from fedjax_het.algorithms.feddf import mean_logits
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.types import Group, Received, Turn, Visit
from fedjax_het.engine.visits import client_key
from fedjax_het.models.blocks import Block, BlockModel, Variables
from fedjax_het.models.norm import BatchNorm
from tests.algorithms import feddf_numpy
from tests.algorithms.suite import Case, Clocks
from tests.models.test_reach import small_maps
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  bytes_of_a_visit,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
  uploads_of,
)
from tests.trees import assert_trees

SUITE = [Case(dict(server_steps=3, server_batch_size=4))]
# Adam would divide what is left of a loss of 0, rounding errors, by their size.
CLOCKS = Clocks(dict(server_steps=2, distill_lr=0.0))

SIZES = (5, 8, 3, 7)
NUM_PUBLIC = 7
KEY = jax.random.key(1)
TURN = Turn(jnp.int32(0), KEY)


class Layer(nn.Module):
  """Dense layer, norm and ReLU.

  A bias before the norm would have a gradient of rounding errors only, which
  Adam makes as large as any other.
  """

  @nn.compact
  def __call__(self, x, train, mask):
    x = nn.Dense(4, use_bias=False)(x.reshape(len(x), -1))
    return nn.relu(BatchNorm()(x, train, mask))


class Last(nn.Module):
  """Dense layer."""

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dense(NUM_CLASSES)(x)


def net(depth):
  """A net with norms."""
  blocks = [Block(name, Layer()) for name in ('stem', 'mid0', 'mid1')[:depth]]
  return BlockModel(
      f'net{depth}', (*blocks, Block('head', Last())), SHAPE, NUM_CLASSES,
      (1, depth),
  )  # fmt: skip


def federate(norm=True, epochs=2, **kwargs):
  """Two architectures, four clients (0 and 2, 1 and 3) and a public set."""
  federation = tiny_federation(
      (1, 2), norm=False, local=tiny_local(optax.sgd, 0.1, epochs, 8),
      num_public=NUM_PUBLIC, **kwargs,
  )  # fmt: skip
  if not norm:
    return federation
  groups = tuple(
      dataclasses.replace(group, model=net(2 + i))
      for i, group in enumerate(federation.groups)
  )
  return dataclasses.replace(federation, groups=groups)


def data_of(seed=0):
  return tiny_data(SIZES, seed, public=NUM_PUBLIC)


def same(a, b):
  return all(
      np.array_equal(x, y)
      for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


# The ensemble and the loss.


@jax.jit
def loss_of(logits, ensemble, position, mask):
  """The loss of a student at given outputs."""

  class Model:
    @staticmethod
    def apply(variables, x, **kwargs):
      assert kwargs['train'] and kwargs['mask'] is mask
      return logits, {}

  batch = Batch(None, None, mask, position)
  return student_loss(Model, ensemble)(None, batch, None)[0]


def test_two_teachers_by_hand():
  """Logits are averaged; means of probabilities or losses differ."""
  rows = jnp.array([[[4.0, 0]], [[np.nan, 90]], [[0, 2]]])
  ensemble = mean_logits(rows, jnp.array([True, False, True]))
  np.testing.assert_allclose(ensemble, [[2, 1]])
  np.testing.assert_allclose(
      jax.nn.softmax(ensemble[0]), [0.731059, 0.268941], atol=1e-6
  )
  loss = loss_of(
      jnp.zeros((1, 2)), ensemble, jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
  )
  np.testing.assert_allclose(loss, 0.110944, atol=1e-6)
  nobody = mean_logits(rows, jnp.zeros(3, bool))
  np.testing.assert_array_equal(nobody, [[0, 0]])


def test_the_gradient_is_the_gap_of_probabilities():
  """(q - p) / B in each of the B examples that count; rows by position."""
  ensemble = jnp.log(jnp.array([[1.0, 3], [3, 1], [1, 1]]))
  logits = jnp.log(jnp.array([[1.0, 1], [1, 4], [9, 1]]))
  mask = jnp.array([True, True, False])
  loss, grad = jax.value_and_grad(loss_of)(
      logits, ensemble, jnp.array([1, 0, 2]), mask
  )
  gaps = [
      0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5),
      0.25 * np.log(0.25 / 0.2) + 0.75 * np.log(0.75 / 0.8),
  ]
  np.testing.assert_allclose(loss, np.mean(gaps), rtol=1e-6)
  want = np.array([[-0.25, 0.25], [-0.05, 0.05], [0, 0]]) / 2
  np.testing.assert_allclose(grad, want, atol=1e-7)


def test_a_student_that_equals_the_ensemble_has_no_gradient():
  ensemble = jnp.array([[3.0, -1, 0.5], [0, 7, 1]])
  loss, grad = jax.value_and_grad(loss_of)(
      ensemble + 2, ensemble, jnp.arange(2), jnp.ones(2, bool)
  )
  np.testing.assert_allclose(loss, 0, atol=1e-6)
  np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_the_servers_adam_by_hand():
  """Gradients of norm 50 and 0.5; the rate is lr (1 + cos(pi j / N)) / 2."""
  training = server_training(tiny_local(), 3, 4, 0.1)
  assert (training.steps, training.batch_size) == (3, 4)
  tx = training.optimizer(training.learning_rate(jnp.int32(5)))
  grads = np.array([[30.0, 40], [0.3, -0.4], [0.0, 0.4]])

  @jax.jit
  def updates(grads):
    state, found = tx.init(jnp.zeros(2)), []
    for g in grads:
      update, state = tx.update(g, state, jnp.zeros(2))
      found.append(update)
    return jnp.stack(found)

  m, v = np.zeros(2), np.zeros(2)
  want, clipped = [], [[3.0, 4], [0.3, -0.4], [0, 0.4]]
  for j, (g, rate) in enumerate(zip(clipped, (0.1, 0.075, 0.025)), 1):
    m, v = 0.9 * m + 0.1 * np.array(g), 0.999 * v + 0.001 * np.square(g)
    step = m / (1 - 0.9**j) / (np.sqrt(v / (1 - 0.999**j)) + 1e-8)
    want.append(-rate * step)
  np.testing.assert_allclose(updates(grads), want, rtol=1e-4)


# Rounds.


def play(algorithm, federation, num=1, data=None, start=None):
  """The server's states before the first round and after each."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  if start is not None:
    state = state._replace(server=start(state.server))
  states, report = [jax.tree.map(np.array, state.server)], None
  for _ in range(num):
    state, report = run_round(state, data or data_of(), KEY, jax.random.key(2))
    states.append(jax.tree.map(np.array, state.server))
  return states, report


def test_a_server_without_steps_is_fedavg():
  """Inside each architecture, bit for bit, with the server's momentum."""
  federation = federate()
  options = dict(weights='data', server_optimizer='sgd', server_momentum=0.9)
  got, report = play(make(federation, server_steps=0, **options), federation, 2)
  want, _ = play(
      fedavg(federation, aggregation='architecture', **options), federation, 2
  )
  assert_trees(got, want, rtol=0, atol=0)
  assert not report.server and not same(got[0], got[1])


def updates(algorithm, data):
  """The server update, with the public set of `data`."""
  turn = TURN._replace(public=data.of_public())
  return jax.jit(lambda server, received: algorithm.server_update(
      server, received, turn
  ))  # fmt: skip


@functools.cache
def uploads():
  """The federation with norms, its data, the uploads of all clients."""
  federation, data = federate(), data_of()
  algorithm = make(federation, weights='data')
  server = jax.device_get(algorithm.init(jax.random.key(0)))
  return federation, data, uploads_of(algorithm, federation, server, data, KEY)


@functools.cache
def cohort(**options):
  """The federation, the server's state, all uploads, data, server update."""
  federation, data, received = uploads()
  options = dict(dict(server_steps=3, distill_lr=0.05), **options)
  algorithm = make(federation, weights='data', **options)
  server = jax.device_get(algorithm.init(jax.random.key(0)))
  return federation, server, received, data, updates(algorithm, data)


def reordered(received, slots):
  """The uploads of every group in other slots, as NumPy arrays."""
  return {
      name: Received(
          (), *jax.tree.map(lambda a: np.array(a)[slots], (r.kept, r.client_id))
      )
      for name, r in received.items()
  }


def absent(received, *names, fill=np.nan):
  """`received` with padding in all slots of some groups."""
  return {
      name: r if name not in names else Received(
          (), jax.tree.map(lambda a: np.full_like(a, fill), r.kept),
          np.full_like(r.client_id, 4),
      )
      for name, r in received.items()
  }  # fmt: skip


def test_the_order_of_clients_does_not_matter():
  _, server, received, _, step = cohort()
  want = step(server, received)
  got = step(server, reordered(received, np.array([1, 0])))
  assert_trees(got, want, rtol=1e-5, atol=1e-5)
  # Nor does the place of a client whose update is not finite.
  first, last = (
      reordered(received, np.array(slots)) for slots in ([0, 1], [1, 0])
  )
  for case, lost in ((first, 0), (last, 1)):
    for r in case.values():
      for leaf in (*jax.tree.leaves(r.kept), r.client_id):
        leaf[lost] = 4 if leaf is r.client_id else np.nan
  assert_trees(
      step(server, first), step(server, last), rtol=1e-5, atol=1e-5
  )


def test_stored_logits_give_the_loss_of_logits_on_the_fly():
  """On a minibatch in any order, from the clients' models in eval mode."""
  federation, server, received, data, _ = cohort()
  exchange = make_exchange(federation, 'architecture', 'data')
  position = jnp.array([5, 0, 3])

  @jax.jit
  def ensembles(server, received):
    public = data.of_public()
    stored = mean_logits(*teacher_logits(exchange, server, received, public))
    x, found = public.batch(position).x, []
    for group in federation.groups:
      kept = received[group.name].kept
      for i in range(2):
        p = kept.weight[i]
        end = jax.tree.map(
            lambda x, d, i=i, p=p: x + d[i] / p,
            {key: server.params[key] for key in kept.change}, kept.change,
        )  # fmt: skip
        stats = jax.tree.map(lambda s, i=i, p=p: s[i] / p, kept.stats)
        own = (
            {key.split('/')[1]: leaf for key, leaf in tree.items()}
            for tree in (end, stats)
        )
        found.append(group.model.apply(Variables(*own), x)[0])
    return stored, sum(found) / len(found)

  stored, direct = ensembles(server, received)
  args = jnp.tile(jnp.arange(3.0), (3, 1)), jnp.ones(3, bool)
  losses = [
      loss_of(args[0], table, place, args[1])
      for table, place in ((stored, position), (direct, jnp.arange(3)))
  ]
  np.testing.assert_allclose(*losses, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(stored[position], direct, rtol=1e-5, atol=1e-6)


def test_an_architecture_without_a_client_learns_from_the_others():
  """From its last model; the other one is as without it."""
  _, server, received, _, step = cohort()
  after, metrics = step(server, absent(received, 'tiny2'))
  both, _ = step(server, received)
  assert not same(after.params['tiny2/mid1'], server.params['tiny2/mid1'])
  assert not same(after.params['tiny1/mid0'], both.params['tiny1/mid0'])
  assert np.isfinite(metrics['server_loss'])
  # Adam's three steps move no number by more than 0.05 (1 + 3/4 + 1/4), and
  # a bit, since its moments have different decays.
  for name in ('stem', 'mid0', 'mid1', 'head'):
    key = f'tiny2/{name}'
    for new, old in zip(
        jax.tree.leaves(after.params[key]), jax.tree.leaves(server.params[key])
    ):
      assert np.all(np.abs(new - old) < 0.11)


def test_nobody_has_sent():
  """No model moves, nor do statistics, and the loss is NaN."""
  _, server, received, _, step = cohort()
  after, metrics = step(server, absent(received, 'tiny1', 'tiny2'))
  assert_trees(after, server, rtol=0, atol=0)
  assert np.isnan(metrics['server_loss'])


def test_a_client_without_a_step_is_no_teacher():
  _, server, received, _, step = cohort()
  zeros = jax.tree.map(np.zeros_like, received['tiny2'].kept)
  idle = dict(received, tiny2=received['tiny2']._replace(kept=zeros))
  got, want = step(server, idle), step(server, absent(received, 'tiny2'))
  assert_trees(got, want, rtol=1e-6, atol=1e-6)


def test_statistics_become_those_of_the_public_examples():
  """Students are in training mode; without a rate their parameters stay.

  The first layer's are then known: a mean of the average's statistics and
  those of the batches.
  """
  momentum = dict(server_optimizer='sgd', server_momentum=0.9)
  federation, server, received, data, step = cohort(
      distill_lr=0.0, server_batch_size=2 * NUM_PUBLIC, **momentum
  )
  algorithm = make(federation, weights='data', server_steps=0, **momentum)
  want = jax.jit(algorithm.server_update)(server, received, TURN)[0]
  got, metrics = step(server, received)
  # The server's momentum is kept, too.
  assert same(got.opt_state, want.opt_state) and same(
      got.variables.params, want.variables.params
  )
  assert metrics['server_loss'] > 1e-3
  got, want = got.variables, want.variables
  x = np.asarray(preprocess(data.images))[np.asarray(data.public)]
  for name in ('tiny1', 'tiny2'):
    kernel = want.params[f'{name}/stem']['Dense_0']['kernel']
    h = x.reshape(len(x), -1) @ kernel
    old, new = (s.stats[f'{name}/stem']['BatchNorm_0'] for s in (want, got))
    for what, value in dict(mean=h.mean(0), var=h.var(0)).items():
      np.testing.assert_allclose(
          new[what], 0.9**3 * old[what] + (1 - 0.9**3) * value, rtol=1e-4
      )


def test_the_model_that_is_evaluated_is_the_students():
  federation, server, _, _, _ = cohort()
  algorithm = make(federation)
  for group in federation.groups:
    got = algorithm.client_model(server, Variables({}, {}), group)
    for part, tree in zip(got, server, strict=True):
      want = {
          key.removeprefix(f'{group.name}/'): leaf
          for key, leaf in tree.items()
          if key.startswith(f'{group.name}/')
      }
      assert set(part) == set(want)
      assert same(part, {name: want[name] for name in part})
  assert not algorithm.personal and not algorithm.one_model


def test_equal_clients_agree_with_their_average():
  """One client, or copies of one: the loss is 0, so the gradient is, too."""
  federation, data = federate(norm=False, epochs=20), data_of()
  one = dataclasses.replace(federation, groups=(
      Group('tiny1', federation.groups[0].model, np.arange(2)),
  ))  # fmt: skip
  algorithm = make(one, server_steps=1, distill_lr=0.0)
  server = sharpened(jax.device_get(algorithm.init(jax.random.key(0))))
  received = uploads_of(algorithm, one, server, data, KEY)
  step = updates(algorithm, data)
  assert step(server, received)[1]['server_loss'] > 2e-5
  copies = reordered(received, np.array([1, 1]))
  copies['tiny1'] = copies['tiny1']._replace(client_id=np.arange(2))
  alone = received['tiny1']._replace(client_id=np.array([0, 2]))
  for case in (copies, dict(tiny1=alone)):
    np.testing.assert_allclose(
        step(server, case)[1]['server_loss'], 0, atol=1e-6
    )


@pytest.mark.parametrize(('weights', 'mean'), [('data', 3), ('uniform', 2)])
def test_the_average_by_hand(weights, mean):
  """Clients of 1 and 3 examples, whose models are 0 and 4 everywhere."""
  federation = federate(norm=False)
  algorithm = make(federation, weights=weights, server_steps=0)
  group = federation.groups[0]
  zeros = jax.tree.map(
      lambda s: np.zeros(s.shape, np.float32),
      jax.eval_shape(algorithm.init, jax.random.key(0)),
  )
  kept = []
  for value, size in ((0.0, 1), (4.0, 3)):
    p = 1.0 if weights == 'uniform' else float(size)
    change = algorithm.downlink(zeros, group, None).params
    change = jax.tree.map(lambda a, v=p * value: np.full_like(a, v), change)
    kept.append((change, {}, np.float32(p)))
  shapes = {
      g.name: jax.eval_shape(
          lambda g=g: algorithm.client_update(
              g, Variables({}, {}), algorithm.downlink(zeros, g, None),
              data_of().client(0), Visit(jnp.int32(0), jnp.int32(0), KEY),
          )[1].kept
      )
      for g in federation.groups
  }  # fmt: skip
  rows = [
      jax.tree.unflatten(jax.tree.structure(shapes[group.name]), leaves)
      for leaves in map(jax.tree.leaves, kept)
  ]
  received = {
      'tiny1': Received(
          (), jax.tree.map(lambda *a: np.stack(a), *rows), np.array([0, 2])
      ),
      'tiny2': Received(
          (),
          jax.tree.map(
              lambda s: np.zeros((1, *s.shape), s.dtype), shapes['tiny2']
          ),
          np.array([4]),
      ),
  }
  after, _ = jax.jit(algorithm.server_update)(zeros, received, TURN)
  for key, tree in after.params.items():
    for leaf in jax.tree.leaves(tree):
      np.testing.assert_allclose(leaf, mean if key.startswith('tiny1') else 0)


def test_uploads_are_as_large_as_fedavgs():
  federation, data = federate(), data_of()
  mine, other = (
      bytes_of_a_visit(method(federation), federation.groups[1], data)
      for method in (make, fedavg)
  )
  assert mine == other


def test_public_examples_are_not_augmented():
  """A preprocessing function that augments gets no key."""

  def augments(images, key=None):
    assert key is None
    return preprocess(images)

  _, server, received, data, _ = cohort()
  step = updates(make(federate()), data.replace(preprocess=augments))
  jax.eval_shape(step, server, received)


def test_unused_weights_of_students_can_be_dropped():
  """The steps are the same with smaller kernels."""
  federation, data = federate(norm=False), data_of()
  model, results = small_maps(), []
  one = dataclasses.replace(federation, groups=(
      Group('maps', model, np.arange(2)),
  ))  # fmt: skip
  for drop in (False, True):
    local = dataclasses.replace(federation.local, drop_unused_weights=drop)
    algorithm = make(
        dataclasses.replace(one, local=local), server_steps=2, distill_lr=0.05
    )
    if not drop:
      server = jax.device_get(algorithm.init(jax.random.key(0)))
      received = uploads_of(algorithm, one, server, data, KEY)
    results.append(updates(algorithm, data)(server, received)[0])
  assert_trees(results[1], results[0], rtol=1e-4, atol=1e-4)


# One round in NumPy.

BLOCKS = {'tiny1': ['stem', 'mid0', 'head'],
          'tiny2': ['stem', 'mid0', 'mid1', 'head']}  # fmt: skip


def doubles(server, name):
  """A model of the server as `feddf_numpy` has it."""
  p, s = {}, {}
  for block in BLOCKS[name]:
    for layer in server.params[f'{name}/{block}'].values():
      for leaf, value in layer.items():
        p[block, leaf] = np.float64(value)
  for block in BLOCKS[name][:-1]:
    moments = server.stats[f'{name}/{block}']['BatchNorm_0']
    s[block] = np.float64(moments['mean']), np.float64(moments['var'])
  return p, s


def sharpened(server):
  """Larger parameters, so that some gradients are clipped."""
  return server._replace(params=jax.tree.map(lambda a: 4 * a, server.params))


def test_one_round_in_numpy():
  """Two architectures with norms, four clients, minibatches of 4 and 3."""
  federation, data = federate(), data_of(3)
  algorithm = make(
      federation, server_steps=3, server_batch_size=4, distill_lr=0.05,
      weights='data',
  )  # fmt: skip
  (before, after), report = play(
      algorithm, federation, data=data, start=sharpened
  )
  images = np.asarray(preprocess(data.images), np.float64)
  images, labels = images.reshape(len(images), -1), np.asarray(data.labels)
  clients = []
  for k, size in enumerate(SIZES):
    index = np.asarray(data.index)[k, :size]
    clients.append((f'tiny{k % 2 + 1}', images[index], labels[index]))
  order_key, _ = jax.random.split(client_key(KEY, jnp.int32(0), 4))
  first, second = (
      np.asarray(shuffled_positions(
          jax.random.fold_in(order_key, epoch), data.of_public()
      ))
      for epoch in range(2)
  )  # fmt: skip
  want, losses, norms = feddf_numpy.one_round(
      {name: doubles(before, name) for name in BLOCKS}, BLOCKS, clients,
      images[np.asarray(data.public)], [first[:4], first[4:], second[:4]],
      lr=0.1, steps=2, distill_lr=0.05,
  )  # fmt: skip
  assert min(norms) < 5 < max(norms)
  for name in BLOCKS:
    assert_trees(doubles(after, name), want[name], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(
      report.server['server_loss'], np.mean(losses), rtol=1e-4
  )


# Refusals.


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(server_steps=-1), 'server_steps must be at least 0'),
        (dict(server_batch_size=0), 'server_batch_size must be at least 1'),
        (dict(distill_lr=-0.1), 'distill_lr must be at least 0'),
        (dict(distill_lr=np.inf), 'distill_lr must be a finite number'),
        (dict(weights='size'), "^Unknown weights 'size'"),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate(), **options)


def test_federations_that_do_not_fit_are_refused():
  private = dataclasses.replace(federate(), num_public=0)
  with pytest.raises(ValueError, match=r'^feddf needs a public set, Fede'):
    make(private)
  with pytest.raises(ValueError, match='feddf does not keep running stati'):
    make(federate(local_stats=True))
  assert make(federate(norm=False, local_stats=True))
