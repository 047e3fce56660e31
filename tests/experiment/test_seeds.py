"""What each seed of a config draws, and what it leaves alone."""

import json
import sys
from unittest import mock

import jax
import ml_collections
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.experiment import examples, programs
from fedjax_het.experiment.sweep_table import with_seed
from tests.experiment.tiny_runs import tiny_config


def differs(a, b) -> bool:
  return not np.array_equal(np.asarray(a), np.asarray(b))


def test_seed_and_sampling_seed_give_keys_of_their_own():
  def keys(**seeds):
    found = programs.run_keys(tiny_config(**seeds))
    return [jax.random.key_data(key) for key in found]

  base = keys()
  for changes, want in (
      (dict(seed=1), [True, True, False]),
      (dict(sampling_seed=1), [False, False, True]),
  ):
    found = keys(**changes)
    assert [differs(a, b) for a, b in zip(base, found)] == want
  for a, b in ((0, 1), (0, 2), (1, 2)):
    assert differs(base[a], base[b])


def test_devices_and_their_jitter_have_seeds():
  config = tiny_config()
  config.devices = ml_collections.ConfigDict(
      dict(slow=dict(clients=2, examples_per_second=1.0), fast=dict(clients=3))
  )
  config.clock.mode = 'async'

  def drawn(device_seed):
    config.clock.device_seed = device_seed
    return experiment.build(config).devices

  found = [drawn(seed) for seed in (None, 0, 1, 2)]
  for devices in found:
    rates = sorted(device.examples_per_second for device in devices)
    assert rates[:2] == [1.0, 1.0] and rates[2] > 1
  assert len({tuple(map(str, devices)) for devices in found[1:]}) > 1
  assert list(found[0]) != list(found[1])
  config.clock.seed = 7
  with mock.patch.object(programs, 'driver_kind') as kind:
    programs.make_driver(experiment.build(config))
  (job,), _ = kind.return_value.make.call_args
  assert job.clock_seed == 7


@pytest.fixture(scope='module')
def two_seeds():
  """Builds a config with two seeds of a partition that does not draw."""

  def built(**changes):
    found = []
    for seed in (0, 1):
      config = tiny_config(**changes)
      config.partition = ml_collections.ConfigDict(
          dict(name='iid', seed=seed, shuffle=False)
      )
      found.append(experiment.build(config))
    return found

  return built


def test_the_seed_of_the_partition_draws_all_sets_of_examples(two_seeds):
  a, b = two_seeds(train_size=300)
  assert differs(a.dataset.train_images, b.dataset.train_images)
  a, b = two_seeds(label_noise=0.3)
  clean = two_seeds()[0].dataset.train_labels
  wrong = [one.dataset.train_labels != clean for one in (a, b)]
  assert differs(*wrong)
  a, b = two_seeds(personal_test=True)
  assert any(differs(x, y) for x, y in zip(a.own_tests, b.own_tests))
  a, b = two_seeds(validation=0.2)
  assert differs(a.validation, b.validation)


def test_held_out_examples_have_the_classes_of_their_clients(two_seeds):
  (whole, _), (built, _) = two_seeds(), two_seeds(validation=0.2)
  labels = built.dataset.train_labels
  for before, after in zip(whole.parts, built.parts, strict=True):
    held = np.setdiff1d(before, after)
    every, some = (
        np.bincount(labels[rows], minlength=10) for rows in (before, held)
    )
    np.testing.assert_allclose(some, 0.2 * every, atol=1.01)


def test_public_sets_have_a_seed_and_the_classes_of_the_rest(tmp_path):
  labels = np.repeat(np.arange(10), 40).astype(np.int32)
  config = tiny_config(public_size=50)

  def public(seed):
    config.partition.seed = seed
    return examples.assign(config, labels, 4)[1]

  config.partition = ml_collections.ConfigDict(dict(name='iid', seed=0))
  assert differs(public(0), public(1))
  # A partition by file leaves every second example.
  parts = np.arange(0, 400, 2).reshape(4, 50).tolist()
  (tmp_path / 'parts.json').write_text(json.dumps(parts))
  config.partition = ml_collections.ConfigDict(
      dict(name='file', seed=0, file=str(tmp_path / 'parts.json'))
  )
  found = public(0)
  assert np.all(found % 2 == 1) and differs(found, public(1))
  np.testing.assert_array_equal(np.bincount(labels[found]), [5] * 10)


def test_devices_by_work_go_to_the_groups_with_the_most_operations_first(
    monkeypatch,
):
  """The deeper models are last by the order of the groups' names."""
  config = tiny_config('fedavg')
  config.groups.small.depth = 4
  config.devices = ml_collections.ConfigDict(
      dict(a=dict(clients=2, up=1.0), b=dict(clients=3, up=2.0))
  )
  for by_work, order in ((False, 'large small'), (True, 'small large')):
    config.clock.device_by_work = by_work
    built = experiment.build(config)
    ids = {group.name: group.client_ids for group in built.federation.groups}
    clients = np.concatenate([ids[name] for name in order.split()])
    assert [built.devices[k].up for k in clients] == [1.0, 1.0, 2.0, 2.0, 2.0]
  # As for a method whose loops depend on what is learned.
  module = sys.modules[experiment.build.__module__]
  monkeypatch.setattr(module, 'client_flops', lambda *args: None)
  with pytest.raises(ValueError, match='not known in advance; set it to False'):
    experiment.build(config)
  config.clock.device_seed = 0
  with pytest.raises(ValueError, match=r'^clock\.device_by_work orders'):
    experiment.check(config)


@pytest.mark.parametrize(
    ('name', 'value'), [('device_by_work', True), ('device_seed', 0)]
)
def test_an_order_of_devices_needs_devices(name, value):
  config = tiny_config('fedavg')
  config.clock[name] = value
  message = rf'^clock\.{name}={value} says .* no devices\.$'
  with pytest.raises(ValueError, match=message):
    experiment.check(config)


def test_the_seed_of_a_cell_is_that_of_its_clock():
  """It moves the cohorts of tiers, the order of clients, jitter and losses."""
  config = tiny_config('fedavg')
  assert with_seed(config, 3, {}).clock.seed == 0
  config.clock.mode = 'async'
  assert with_seed(config, 3, {}).clock.seed == 3
  config.clock.mode = 'synchronous'
  config.devices = ml_collections.ConfigDict(dict(a=dict(clients=5)))
  assert with_seed(config, 3, {}).clock.seed == 3
