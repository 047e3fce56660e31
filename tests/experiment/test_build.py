"""Building an experiment, and refusing configs that do not fit the data."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from fedjax_het import experiment
from fedjax_het.configs import fedin
from fedjax_het.experiment import facts
from fedjax_het.experiment.local import local_training
from tests.experiment.tiny_runs import tiny_config


def message(config):
  with pytest.raises(ValueError) as error:
    experiment.build(config)
  assert '\n' not in str(error.value)
  return str(error.value)


def test_builds_what_the_config_says():
  built = experiment.build(tiny_config())
  # Groups come in alphabetical order, clients in order.
  assert [g.name for g in built.federation.groups] == ['large', 'small']
  assert [len(g.model.blocks) for g in built.federation.groups] == [4, 3]
  np.testing.assert_array_equal(
      np.concatenate([g.client_ids for g in built.federation.groups]),
      np.arange(5),
  )
  assert built.cohort_size == 4
  assert built.data.num_clients == 5
  assert int(np.min(built.data.sizes)) >= 16
  # Preprocessing standardises the training set.
  x = np.asarray(built.preprocess(built.data.images))
  np.testing.assert_allclose(x.mean(), 0, atol=1e-4)
  np.testing.assert_allclose(x.std(), 1, atol=1e-4)


def test_group_seed_deals_clients_at_random():
  built = experiment.build(tiny_config(group_seed=1))
  sizes = {g.name: g.num_clients for g in built.federation.groups}
  assert sizes == dict(large=2, small=3)
  ids = np.concatenate([g.client_ids for g in built.federation.groups])
  assert sorted(ids) == [*range(5)]
  others = [
      experiment.build(tiny_config(group_seed=seed)).federation.groups
      for seed in (2, 3)
  ]
  assert any(
      not np.array_equal(g[0].client_ids, built.federation.groups[0].client_ids)
      for g in others
  )


def test_fewer_examples_and_wrong_labels():
  whole = experiment.build(tiny_config())
  few = experiment.build(tiny_config(train_size=200))
  noisy = experiment.build(tiny_config(train_size=200, label_noise=0.25))
  assert len(few.dataset.train_labels) == int(few.data.sizes.sum()) == 200
  share = np.bincount(whole.dataset.train_labels) / 1442 * 200
  assert np.all(np.abs(np.bincount(few.dataset.train_labels) - share) <= 1)
  assert np.sum(noisy.data.labels != few.data.labels) == 50
  np.testing.assert_array_equal(noisy.data.images, few.data.images)
  for built in (few, noisy):
    np.testing.assert_array_equal(
        built.dataset.test_labels, whole.dataset.test_labels
    )
  assert message(tiny_config(train_size=1443)) == (
      'train_size=1443 is more than the 1442 training examples of digits.'
  )
  assert message(tiny_config(label_noise=1.0)) == (
      'label_noise must be at least 0 and below 1, got 1.0.'
  )


@pytest.mark.parametrize(
    'partition',
    [
        dict(name='dirichlet', alpha=0.5, seed=0),
        dict(name='shards', shards_per_client=2, seed=0),
    ],
)
def test_wrong_labels_leave_the_partition_as_it_is(partition):
  settings = dict(partition=partition, personal_test=True, validation=0.1)
  few = experiment.build(tiny_config(**settings))
  noisy = experiment.build(tiny_config(**settings, label_noise=0.3))
  wrong = noisy.dataset.train_labels != few.dataset.train_labels
  assert np.sum(wrong) == round(0.3 * len(wrong))
  for of_few, of_noisy in (
      (few.parts, noisy.parts),
      (few.own_tests, noisy.own_tests),
      ([few.validation], [noisy.validation]),
  ):
    for few_part, noisy_part in zip(of_few, of_noisy, strict=True):
      np.testing.assert_array_equal(few_part, noisy_part)


def test_refuses_more_clients_than_examples():
  config = tiny_config()
  config.groups.small.clients = 1442
  assert message(config) == (
      'groups hold 1444 clients, more than the 1442 training examples of '
      'digits.'
  )


def warnings_of(caplog, config):
  caplog.clear()
  experiment.build(config)
  return [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']


def test_batches_larger_than_clients(caplog):
  """Some clients may be smaller than a batch, but not all of them."""
  sizes = [len(part) for part in experiment.build(tiny_config()).parts]
  most = max(sizes)
  (line,) = warnings_of(caplog, tiny_config(local__batch_size=most))
  fewer = sum(size < most for size in sizes)
  assert 0 < fewer < len(sizes)
  assert line == (
      f'{fewer} of {len(sizes)} clients have fewer examples than '
      f'local.batch_size={most}, the smallest {min(sizes)}; a local step of '
      'theirs is on all they have.'
  )
  assert message(tiny_config(local__batch_size=most + 1)) == (
      f'local.batch_size={most + 1} is larger than every client; the largest '
      f'has {most} examples, so set it to {most} or less.'
  )


def npz_config(tmp_path, y_train, y_test):
  """A config of a table with these labels, dealt to four clients."""
  x = np.zeros((max(len(y_train), len(y_test)), 3), np.float32)
  np.savez(
      tmp_path / 'a.npz', x_train=x[: len(y_train)], y_train=y_train,
      x_test=x[: len(y_test)], y_test=y_test,
  )  # fmt: skip
  config = tiny_config(
      'private', dataset='npz', data_file=str(tmp_path / 'a.npz'),
      partition=dict(name='iid', seed=0), local__batch_size=6,
  )  # fmt: skip
  config.groups = ml_collections.ConfigDict(dict(mlp=4))
  return config


def test_warns_of_classes_without_training_examples(tmp_path, caplog):
  from_one = np.tile([1, 2, 3], 8)
  (line,) = warnings_of(caplog, npz_config(tmp_path, from_one, from_one[:6]))
  assert line == (
      '1 of 4 classes have no training example (0), and 0 of 6 test examples '
      'are of them; labels count from 0.'
  )
  (line,) = warnings_of(caplog, npz_config(tmp_path, from_one - 1, [0, 3, 3]))
  assert line == (
      '1 of 4 classes have no training example (3), and 2 of 3 test examples '
      'are of them; labels count from 0.'
  )
  far = np.where(from_one == 3, 20, from_one)
  (line,) = warnings_of(caplog, npz_config(tmp_path, far, far))
  assert line.startswith('18 of 21 classes ')
  assert '(0, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...)' in line
  assert not warnings_of(caplog, npz_config(tmp_path, from_one - 1, [0, 2]))


def test_warns_where_batch_norm_meets_a_few_examples(caplog):
  """Warns in one line, and only if batch norm gets a small batch."""
  parts = experiment.build(tiny_config()).parts
  size = 5  # The last batch of some clients has 1 to 3 examples.
  few = sum(0 < len(part) % size < 4 for part in parts)
  assert 0 < few < len(parts)
  (line,) = warnings_of(caplog, tiny_config(local__batch_size=size))
  assert line == (
      'Batch norm needs batches of 4 examples or more, but the last batch of '
      f'{few} of {len(parts)} clients is smaller; local.drop_last leaves it '
      'out.'
  )
  quiet = [
      dict(local__drop_last=True),
      dict(model__norm='group'),
      # Visits end before the partial batch.
      dict(local__steps=1),
  ]
  for changes in quiet:
    config = tiny_config(local__batch_size=size, **changes)
    assert not warnings_of(caplog, config)
  # A client smaller than a batch has a partial one nonetheless.
  config = tiny_config(
      train_size=60, local__batch_size=4, local__drop_last=True,
      partition=dict(name='quantity', seed=0, alpha=0.4, min_size=1),
  )  # fmt: skip
  few = sum(len(part) < 4 for part in experiment.build(config).parts)
  assert 0 < few < 5
  assert warnings_of(caplog, config)[-1] == (
      'Batch norm needs batches of 4 examples or more, but the last batch of '
      f'{few} of 5 clients is smaller; give each client at least 4 examples.'
  )
  small = tiny_config(local__batch_size=2, local__drop_last=True)
  (line,) = warnings_of(caplog, small)
  assert line == (
      'Batch norm meets batches of local.batch_size=2: its statistics need 4 '
      'examples or more.'
  )


def test_refuses_a_partition_that_cannot_be():
  config = tiny_config()
  config.partition.min_size = 1000
  text = message(config)
  assert text.startswith('partition: ') and '1000' in text


def test_names_the_section_of_what_constructors_refuse():
  assert message(tiny_config('fedprox', algorithm__mu=-1.0)).startswith(
      'algorithm: mu must be at least 0, got -1.0'
  )
  config = tiny_config()
  config.groups.small.depth = 1
  assert message(config).startswith('groups.small: depth must be at least 2')


def test_refuses_images_that_a_model_cannot_take():
  config = tiny_config(algorithm='private')
  config.groups = ml_collections.ConfigDict(dict(fedhe_cnn5=5))
  config.model = ml_collections.ConfigDict({})
  text = message(config)
  assert text.startswith('groups.fedhe_cnn5: ') and '8x8' in text


def test_refuses_groups_whose_shared_blocks_differ():
  config = tiny_config()
  config.groups.small.hidden = 16
  text = message(config)
  assert text.startswith('algorithm: ')
  assert "'small'" in text and "'large'" in text


def test_missing_files_are_no_crash():
  with pytest.raises(FileNotFoundError, match='mnist needs data_dir'):
    experiment.build(tiny_config(dataset='mnist'))


def test_resizes_images():
  built = experiment.build(tiny_config(image_size=12))
  assert built.dataset.train_images.shape == (1442, 12, 12, 1)
  assert built.dataset.test_images.shape == (355, 12, 12, 1)
  assert built.dataset.train_images.dtype == np.uint8
  # A constant border of the digits stays black.
  assert built.dataset.train_images[:, 0, 0].max() == 0
  pixels = built.dataset.train_images / 255
  np.testing.assert_allclose(built.dataset.mean, pixels.mean(), rtol=1e-5)
  np.testing.assert_allclose(built.dataset.std, pixels.std(), rtol=1e-5)
  # Each image is that of its label, also in later batches.
  plain = experiment.build(tiny_config()).dataset
  for small, large, rows in (
      (plain.train_images, built.dataset.train_images, [0, 999, 1000, 1441]),
      (plain.test_images, built.dataset.test_images, [0, 354]),
  ):
    want = jax.image.resize(
        small[rows].astype(np.float32), (len(rows), 12, 12, 1), 'linear'
    )
    np.testing.assert_array_equal(large[rows], np.round(want))


def test_pixels_may_be_scaled_to_minus_one_and_one():
  built = experiment.build(tiny_config(normalise='half'))
  ends = np.array([0, 255], np.uint8).reshape(1, 1, 2, 1)
  np.testing.assert_allclose(
      np.ravel(built.preprocess(ends)), [-1, 1], atol=1e-6
  )


def rates(config, rounds):
  rate = jax.jit(local_training(config).learning_rate)
  return [float(rate(jnp.int32(r))) for r in range(rounds)]


def test_learning_rate_schedules():
  config = tiny_config(local__learning_rate=0.1)
  assert rates(config, 2) == pytest.approx([0.1, 0.1])
  config = tiny_config(
      local__learning_rate=0.1, local__schedule='step', local__lr_rounds=(3, 4)
  )
  # Rounds count from 1: the third round is the first with the lower rate.
  assert rates(config, 5) == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])
  config = tiny_config(local__learning_rate=0.1, local__schedule='cosine')
  half = 0.05 * (1 + np.cos(np.pi * np.arange(4) / 4))
  assert rates(config, 4) == pytest.approx(half, rel=1e-5)


def first_update(config, grad):
  tx = local_training(config).optimizer(0.1)
  params = jnp.array([2.0, 0.0])
  return np.asarray(tx.update(jnp.asarray(grad), tx.init(params), params)[0])


def test_optimisers_closed_forms():
  sgd = dict(local__optimizer='sgd')
  grad = [3.0, 4.0]
  np.testing.assert_allclose(
      first_update(tiny_config(**sgd), grad), [-0.3, -0.4], rtol=1e-6
  )
  # Decay 0.5 adds 0.5 w to the gradient; the norm 5 is clipped to 1 first.
  np.testing.assert_allclose(
      first_update(
          tiny_config(**sgd, local__weight_decay=0.5, local__clip_norm=1.0),
          grad,
      ),
      [-0.1 * (0.6 + 1.0), -0.08],
      rtol=1e-6,
  )
  # Adam's first step is the learning rate times the sign; decoupled decay
  # adds lr * decay * w.
  np.testing.assert_allclose(
      first_update(tiny_config(), grad), [-0.1, -0.1], rtol=1e-5
  )
  np.testing.assert_allclose(
      first_update(
          tiny_config(local__optimizer='adamw', local__weight_decay=0.5), grad
      ),
      [-0.1 - 0.1 * 0.5 * 2.0, -0.1],
      rtol=1e-5,
  )


def test_momentum_accumulates():
  config = tiny_config(local__optimizer='sgd', local__momentum=0.9)
  tx = local_training(config).optimizer(0.1)
  params = jnp.array([1.0])
  state = tx.init(params)
  for _ in range(2):
    updates, state = tx.update(jnp.array([1.0]), state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(params, [1.0 - 0.1 - 0.19], rtol=1e-6)


def test_groups_of_tables_are_in_natural_order():
  built = experiment.build(fedin.get_config())
  names = [group.name for group in built.federation.groups]
  assert names == sorted(names)  # As in the config.
  assert [*facts.measure(built)['groups']] == [
      'mini_resnet6', 'mini_resnet8', 'mini_resnet10'
  ]  # fmt: skip
