"""Runs that do not fit into memory are refused before they allocate it."""

import resource
import types

import jax
import ml_collections
import pytest

from fedjax_het import experiment
from fedjax_het.experiment import footprint
from fedjax_het.experiment.programs import compile_programs
from tests.experiment.tiny_runs import tiny_config


@pytest.fixture
def gigabyte(monkeypatch):
  monkeypatch.setattr(footprint, 'available_bytes', lambda: 10**9)


def message(config):
  with pytest.raises(ValueError) as error:
    experiment.build(config)
  assert '\n' not in str(error.value)
  return str(error.value)


def test_what_is_available_is_less_than_all_and_heeds_a_limit():
  if jax.default_backend() != 'cpu':
    pytest.skip('the memory of an accelerator is its own')
  before = footprint.available_bytes()
  assert 10**7 < before < 10**14
  old = resource.getrlimit(resource.RLIMIT_AS)
  with open('/proc/self/statm', encoding='utf-8') as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
  try:
    resource.setrlimit(resource.RLIMIT_AS, (taken + 10**8, old[1]))
    assert footprint.available_bytes() <= 10**8
  finally:
    resource.setrlimit(resource.RLIMIT_AS, old)


def test_cached_files_of_a_control_group_are_available(monkeypatch):
  if jax.default_backend() != 'cpu':
    pytest.skip('the memory of an accelerator is its own')
  group = dict(
      max=['8000'], current=['7900'], stat=['anon 900', 'inactive_file 7000']
  )
  monkeypatch.setattr(
      footprint,
      '_lines',
      lambda path: group.get(path.rpartition('memory.')[2], []),
  )
  assert footprint.available_bytes() == 7100
  group['max'] = ['max']
  assert footprint.available_bytes() is None


def test_images_are_not_resized_beyond_memory(gigabyte):
  # 1,797 images of 4000 x 4000 pixels, three times.
  assert message(tiny_config(image_size=4000)) == (
      'image_size=4000: the resized images need at least 86.26 GB of memory, '
      'but 1.00 GB are available.'
  )


def test_the_entry_that_needs_most_is_named(monkeypatch):
  monkeypatch.setattr(footprint, 'available_bytes', lambda: 10**8)
  config = tiny_config(model__hidden=10_000)
  assert message(config).startswith('groups: the run needs at least ')
  # Wide maps: 355 test images, 32 channels of 64 x 64 in and out.
  config = tiny_config(image_size=64, eval_batch_size=9999)
  config.groups = ml_collections.ConfigDict(dict(mini_resnet6=5))
  config.model = ml_collections.ConfigDict({})
  text = message(config)
  assert text.startswith('eval_batch_size=9999: the run needs at least 0.38')
  assert text.endswith(', 0.37 GB of it here, but 0.10 GB are available.')
  monkeypatch.setattr(footprint, 'available_bytes', lambda: 3 * 10**7)
  config.eval_batch_size, config.local.batch_size = 1, 64
  assert message(config).startswith('local.batch_size=64: the run needs ')


def test_clients_states_are_counted(monkeypatch):
  """Adam keeps two numbers per parameter, and a private client its model."""
  needs = {}
  monkeypatch.setattr(
      footprint, 'refuse_if_too_large', lambda n, what: needs.update(n)
  )
  built = experiment.build(tiny_config('private'))
  weights = [
      sum(4 * leaf.size for leaf in jax.tree.leaves(variables))
      for variables in (
          group.model.abstract_variables.params
          for group in built.federation.groups
      )
  ]
  stats = [
      sum(
          4 * leaf.size
          for leaf in jax.tree.leaves(group.model.abstract_variables.stats)
      )
      for group in built.federation.groups
  ]
  clients = sum(
      group.num_clients * (w + s)
      for group, w, s in zip(built.federation.groups, weights, stats)
  )
  assert needs['groups'] == 4 * max(weights) + clients
  assert needs['dataset'] == 1797 * 64


def test_each_device_has_a_copy_of_the_data(monkeypatch):
  asked = []
  monkeypatch.setattr(
      footprint, 'refuse_if_too_large', lambda n, what: asked.append((n, what))
  )
  built = experiment.build(tiny_config(backend='shard_map'))
  (needs, what), (whole, _) = asked
  num = jax.device_count()
  one = sum(leaf.nbytes for leaf in jax.tree.leaves(built.data))
  assert needs == {'dataset': num * one}
  assert what == f'a copy of the data for each of {num} devices needs'
  assert 'groups' in whole
  asked.clear()
  experiment.build(tiny_config(backend='map'))
  assert [n for n, _ in asked] == [whole]


def test_a_run_that_fits_is_not_refused(gigabyte):
  experiment.build(tiny_config())
  footprint.refuse_if_too_large({'a': 5 * 10**8, 'b': 5 * 10**8}, 'it needs')
  with pytest.raises(ValueError, match=r'^b: it needs at least 1\.10 GB of me'):
    footprint.refuse_if_too_large({'a': 10**8, 'b': 10**9}, 'it needs')


@pytest.mark.parametrize(('backend', 'devices'), [('map', 1), ('shard_map', 4)])
def test_a_round_needs_the_memory_of_all_devices(monkeypatch, backend, devices):
  """XLA plans for one of them, and they share the memory."""
  needs = {}
  plan = dict(arguments=100, outputs=5, reused=3, temporary=10)
  program = types.SimpleNamespace(
      run=None, memory=lambda: plan, timeline=None, seconds=None
  )
  driver = types.SimpleNamespace(compile=lambda state: program, warm_up=None)
  built = experiment.build(tiny_config(backend=backend))
  monkeypatch.setattr(
      footprint, 'refuse_if_too_large', lambda n, what: needs.update(n)
  )
  assert compile_programs(built, driver, None).memory() == plan
  assert list(needs.values()) == [12 * devices]
