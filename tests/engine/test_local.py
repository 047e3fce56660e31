"""The local loop: closed forms, ragged clients, partial batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.data.federated import InMemory, federate
from fedjax_het.engine import local
from fedjax_het.engine.task import CLASSIFICATION, masked_mean
from fedjax_het.engine.types import LocalTraining, Turn
from fedjax_het.models import Variables


def plain(images, key=None):
  del key
  return images.astype(jnp.float32)


def make_data(sizes, pad_to=0):
  """Client k holds the values k*10, k*10+1, ... as 1x1 images."""
  values = [10 * k + np.arange(n) for k, n in enumerate(sizes)]
  flat = np.concatenate(values)
  parts = np.split(np.arange(len(flat)), np.cumsum(sizes)[:-1])
  data = federate(
      flat.astype(np.uint8).reshape(-1, 1, 1, 1), flat % 3, parts, plain
  )
  missing = max(0, pad_to - data.index.shape[1])
  return data.replace(index=jnp.pad(data.index, ((0, 0), (0, missing))))


def seen_batches(client, *, epochs, batch_size, drop_last=False, seed=0):
  """Runs the loop and returns each step's examples, padding left out."""
  limit = 20

  def step(carry, batch, step_num, key):
    del key
    rows, count = carry
    mask = batch.mask
    if mask is None:
      mask = jnp.ones(batch_size, bool)
    values = jnp.where(mask, batch.x.reshape(-1), -1.0)
    return (rows.at[step_num].set(values), count + 1), {}

  carry = (jnp.full((limit, batch_size), -1.0), jnp.int32(0))
  (rows, count), _, num_steps = local.train_epochs(
      step,
      carry,
      client,
      jax.random.key(seed),
      epochs=epochs,
      batch_size=batch_size,
      drop_last=drop_last,
  )
  assert int(count) == int(num_steps)
  return [row[row >= 0] for row in np.asarray(rows[: int(count)])]


def test_every_epoch_sees_every_example_once():
  data = make_data([7, 10])
  batches = seen_batches(data.client(0), epochs=3, batch_size=3)
  assert [len(b) for b in batches] == [3, 3, 1] * 3
  epochs = [np.concatenate(batches[i : i + 3]) for i in (0, 3, 6)]
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(7))
  assert not np.array_equal(epochs[0], epochs[1])


def test_no_epoch_changes_nothing():
  """FedMD may leave out a phase of its training, or all of its digest."""

  def step(carry, batch, step_num, key):
    del batch, step_num, key
    return carry + 1, {'loss': jnp.float32(3.0)}

  carry, metrics, num_steps = local.train_epochs(
      step, jnp.int32(5), make_data([7]).client(0), jax.random.key(0),
      epochs=0, batch_size=3,
  )  # fmt: skip
  assert (int(carry), float(metrics['loss']), int(num_steps)) == (5, 0.0, 0)


def test_the_step_is_traced_once():
  traced = []

  def step(carry, batch, step_num, key):
    del batch, key
    traced.append(step_num)
    return carry + 1, {}

  client = make_data([7]).client(0)
  jax.eval_shape(
      lambda key: local.train_epochs(
          step, jnp.int32(0), client, key, epochs=1, batch_size=3
      ),
      jax.random.key(0),
  )
  assert len(traced) == 1


def test_drop_last_leaves_out_the_partial_batch():
  data = make_data([7, 2])
  batches = seen_batches(data.client(0), epochs=2, batch_size=3, drop_last=True)
  assert [len(b) for b in batches] == [3, 3, 3, 3]
  # A client with less than one batch has one partial batch per epoch.
  short = data.client(1)
  batches = seen_batches(short, epochs=2, batch_size=3, drop_last=True)
  assert [sorted(b) for b in batches] == [[10, 11], [10, 11]]


@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('steps', [None, 5])
def test_steps_and_examples_of_a_visit_are_those_of_training(drop_last, steps):
  """The clock and the balance count what `train_epochs` runs."""
  sizes = [1, 2, 3, 4, 7, 9]
  data = make_data(sizes)
  training = LocalTraining(
      optax.sgd, lambda _: 0.1, 2, 3, drop_last=drop_last, steps=steps
  )

  def step(count, batch, step_num, key):
    del step_num, key
    return count + jnp.sum(batch.mask), {}

  for k, size in enumerate(sizes):
    count, _, num_steps = local.train_epochs(
        step, jnp.int32(0), data.client(k), jax.random.key(0), epochs=2,
        batch_size=3, drop_last=drop_last, steps=steps,
    )  # fmt: skip
    assert int(num_steps) == int(local.visit_steps(training, jnp.int32(size)))
    assert int(num_steps) > 0
    assert int(count) == local.visit_examples(training, size)
  assert int(local.visit_steps(training, jnp.int32(0))) == 0


def test_one_partial_batch_is_masked_like_any_other():
  """Its mean is over the client's own examples."""
  data = make_data([2, 9])

  def step(carry, batch, step_num, key):
    del step_num, key
    return carry, {'mean': masked_mean(batch.x.reshape(-1), batch.mask)}

  _, metrics, num_steps = local.train_epochs(
      step, (), data.client(0), jax.random.key(0), epochs=1, batch_size=4,
      drop_last=True,
  )  # fmt: skip
  assert int(num_steps) == 1 and float(metrics['mean']) == 0.5


def test_padding_a_table_changes_nothing():
  short = seen_batches(make_data([7]).client(0), epochs=2, batch_size=3)
  long = seen_batches(make_data([7], 29).client(0), epochs=2, batch_size=3)
  for a, b in zip(short, long, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('tx', [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_finished_clients_keep_their_carry_under_vmap(tx):
  """Parameters, moments and step counters equal those of a client alone."""
  data = make_data([2, 9, 5])

  def train(client_id):
    def step(carry, batch, step_num, key):
      w, opt = carry
      grad = jax.grad(
          lambda w: masked_mean(
              jnp.square(w - batch.x.reshape(-1)), batch.mask
          )
      )(w)
      updates, opt = tx.update(grad, opt, w)
      return (optax.apply_updates(w, updates), opt), {'grad': grad}

    start = jnp.float32(3.0)
    return local.train_epochs(
        step,
        (start, tx.init(start)),
        data.client(client_id),
        jax.random.fold_in(jax.random.key(0), client_id),
        epochs=2,
        batch_size=4,
    )

  together = jax.vmap(train)(jnp.arange(3))
  for k in range(3):
    alone = train(jnp.int32(k))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together)):
      np.testing.assert_allclose(a, b[k], rtol=1e-6)


def test_two_sgd_steps_closed_form():
  """f = (w - 1)^2 / 2 from 0 with rate 0.1: 0.1, then 0.19 (FedAvg check 1)."""
  data = make_data([1]).replace(images=jnp.ones((1, 1, 1, 1), jnp.uint8))

  def make_step(mu):
    def step(w, batch, step_num, key):
      grad = w - jnp.mean(batch.x)
      return w - 0.1 * local.proximal_gradient(grad, w, 0.0, mu), {}

    return step

  for mu, want in [(0, 0.19), (1.0, 0.18), (0.1, 0.189)]:
    w, _, num_steps = local.train_epochs(
        make_step(mu),
        jnp.float32(0),
        data.client(0),
        jax.random.key(0),
        epochs=2,
        batch_size=1,
    )
    assert int(num_steps) == 2
    np.testing.assert_allclose(w, want, rtol=1e-6)


def test_proximal_gradient_is_zero_at_the_anchor_and_mu_times_distance():
  grads = {'a': jnp.array([1.0, -2.0])}
  anchor = {'a': jnp.array([0.3, 0.7])}
  same = local.proximal_gradient(grads, anchor, anchor, 0.1)
  np.testing.assert_array_equal(same['a'], grads['a'])
  moved = local.proximal_gradient(
      {'a': jnp.zeros(1)}, {'a': jnp.ones(1)}, {'a': jnp.zeros(1)}, 0.1
  )
  np.testing.assert_allclose(moved['a'], [0.1], rtol=1e-6)


def test_masked_examples_do_not_count_in_the_loss():
  logits = jnp.array([[2.0, 0.0], [0.0, 5.0], [9.0, 9.0]])
  labels = jnp.array([0, 0, 1])
  mask = jnp.array([True, True, False])
  np.testing.assert_allclose(
      CLASSIFICATION.loss(logits, labels, mask),
      CLASSIFICATION.loss(logits[:2], labels[:2]),
      rtol=1e-6,
  )
  assert float(CLASSIFICATION.loss(logits, labels, jnp.zeros(3, bool))) == 0.0


def features(size, length, width=2):
  """Examples of which the first `size` are real; padding is 1e6."""
  x = jnp.arange(length * width, dtype=jnp.float32).reshape(length, width)
  x = jnp.where(jnp.arange(length)[:, None] < size, x, 1e6)
  return InMemory(x, jnp.arange(length) % 3, jnp.int32(size))


def test_examples_in_memory_are_trained_on_and_mapped_like_a_clients():
  """The order is that of a client of equal size; nothing is preprocessed."""
  data, own = features(7, 16), make_data([7], 16).client(0)
  assert data.length == own.length == 16
  key = jax.random.key(3)
  np.testing.assert_array_equal(
      local.shuffled_positions(key, data), local.shuffled_positions(key, own)
  )
  for batch_size in (1, 3, 7, 16, 100):
    rows = local.map_examples(
        lambda batch: (batch.x, batch.y), data, batch_size
    )
    assert [len(row) for row in rows] == [16, 16]
    np.testing.assert_array_equal(rows[0][:7], data.x[:7])
    np.testing.assert_array_equal(rows[1][:7], data.y[:7])


def test_mapped_batches_are_evenly_spaced_and_depend_on_real_examples_alone():
  """Of 7 examples in batches of 3: (0, 3, 6), (1, 4), (2, 5)."""

  def mean(batch):
    some = jnp.where(batch.mask, batch.x[:, 0], 0.0)
    return jnp.full(len(batch.mask), jnp.sum(some) / jnp.sum(batch.mask))

  for length in (7, 8, 30):
    data = features(7, length)  # The inputs are 0, 2, 4, ...
    got = local.map_examples(mean, data, 3)
    assert got[:7].tolist() == [6, 5, 7, 6, 5, 7, 6]
  none = local.map_examples(mean, features(0, 4), 3)
  assert len(none) == 4
  # Ten in batches of at most 8 are two of five, not two of eight.
  length = local.map_examples(
      lambda batch: jnp.full(len(batch.mask), len(batch.mask)),
      features(10, 10), 8,
  )  # fmt: skip
  assert length.tolist() == [5] * 10


def test_a_record_of_training_passes_goes_with_the_steps():
  """It holds each example's last step; the training equals that of `fit`."""
  data, turn = features(5, 8), Turn(jnp.int32(1), jax.random.key(0))
  training = LocalTraining(optax.sgd, lambda r: 0.1 * r, 3, 2)
  start = Variables({'w': jnp.zeros(2)}, {'steps': jnp.int32(0)})

  def loss_fn(variables, batch, key):
    del key
    error = batch.x - variables.params['w'][None]
    loss = masked_mean(jnp.sum(error**2, 1), batch.mask)
    stats = {'steps': variables.stats['steps'] + 1}
    return loss, (stats, {'two': jnp.float32(2)}, stats['steps'])

  def add(last, step, batch):
    place = jnp.where(batch.mask, batch.position, data.length)
    return last.at[place].set(step, mode='drop')

  *trained, last = local.fit_and_record(
      loss_fn, training, start, data, turn,
      record=jnp.full(8, -1), add=add,
  )  # fmt: skip
  # Three steps an epoch: the last epoch has steps 7, 8 and 9.
  assert sorted(last.tolist()) == [-1, -1, -1, 7, 7, 8, 8, 9]
  assert last[5:].tolist() == [-1, -1, -1]
  end, _, metrics, num_steps = trained
  assert int(num_steps) == 9 and float(metrics['two']) == 2.0
  assert np.all(end.params['w'] > 0) and np.all(end.params['w'] < 10)
  plain = local.fit(
      lambda *args: (loss_fn(*args)[0], loss_fn(*args)[1][:2]),
      training, start, data, turn,
  )  # fmt: skip
  jax.tree.map(np.testing.assert_array_equal, tuple(trained), plain)


def test_orders_drawn_epoch_by_epoch_are_those_drawn_at_once(monkeypatch):
  client = make_data([7]).client(0)
  at_once = seen_batches(client, epochs=3, batch_size=3)
  monkeypatch.setattr(local, '_ORDERS', 1)
  one_by_one = seen_batches(client, epochs=3, batch_size=3)
  for a, b in zip(one_by_one, at_once, strict=True):
    np.testing.assert_array_equal(a, b)


def test_more_steps_than_can_be_counted_are_refused():
  client = make_data([7]).client(0)
  with pytest.raises(ValueError, match='are more than 2147483647 steps'):
    seen_batches(client, epochs=2**31 - 1, batch_size=3)


def test_steps_and_their_augmentations_have_keys_of_their_own():
  def preprocess(images, key):
    return jnp.full(len(images), jax.random.bits(key))

  def step(drawn, batch, step_num, key):
    now = jnp.stack([batch.x[0], jax.random.bits(key)])
    return drawn.at[step_num].set(now), {}

  client = make_data([7]).replace(preprocess=preprocess).client(0)
  drawn, _, num_steps = local.train_epochs(
      step, jnp.zeros((6, 2), jnp.uint32), client, jax.random.key(0),
      epochs=2, batch_size=3,
  )  # fmt: skip
  assert int(num_steps) == 6 and len(np.unique(drawn)) == 12
