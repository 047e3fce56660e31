"""Old names are refused in new configs and calls, and read in stored ones."""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.shared_checkpoints import SharedCheckpoints
from fedjax_het.experiment.stored_config import with_new_entries
from fedjax_het.options import keyword_options
from fedjax_het.renamed import current_paths, new_name, with_moved_entries
from tests.experiment.tiny_runs import tiny_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
OLD = [
    ('fd', 'gamma', 'distill_weight'),
    ('fedasync', 'rho', 'mu'),
    ('fedet', 'lam', 'distill_weight'),
    ('fedgen', 'generative_beta', 'distill_weight'),
    ('fedgkt', 'alpha', 'distill_weight'),
    ('fedhe', 'alpha', 'distill_weight'),
    ('moon', 'mu', 'contrast_weight'),
    ('scalefl', 'gamma', 'distill_weight'),
]


@pytest.mark.parametrize(('method', 'old', 'new'), OLD)
def test_an_old_option_is_refused_with_the_new_name(method, old, new):
  with pytest.raises(ValueError) as error:
    ALGORITHMS[method](None, **{old: 1.0})
  assert str(error.value) == (
      f'{old}: this option of {method} is now called {new}.'
  )
  want = f'algorithm.{old}: this option of {method} is now called algorithm.'
  config = tiny_config(method)
  with config.unlocked():
    config.algorithm[old] = 1.0
  for refuse in (
      lambda: experiment.algorithm_config(method, **{old: 1.0}),
      lambda: experiment.check(config),
  ):
    with pytest.raises(ValueError) as error:
      refuse()
    assert str(error.value) == f'{want}{new}.'


@pytest.mark.parametrize(('method', 'old', 'new'), OLD)
def test_an_old_option_of_a_stored_config_is_read(method, old, new):
  full = json.loads(json.dumps(tiny_config(method).to_dict()))
  stored = {**full, 'algorithm': {**full['algorithm'], old: 0.37}}
  del stored['algorithm'][new]
  before = json.dumps(stored)
  want = {**full, 'algorithm': {**full['algorithm'], new: 0.37}}
  assert with_moved_entries(stored) == with_new_entries(stored) == want
  assert with_new_entries(want) == want
  assert json.dumps(stored) == before


def test_methods_that_have_an_old_name_keep_it():
  for method, option in (
      ('fedasync', 'alpha'), ('fedprox', 'mu'), ('fedin', 'lam'),
      ('fedin', 'mu'), ('fednova', 'mu'),
  ):  # fmt: skip
    assert new_name(f'algorithm.{option}', method) == ''
    stored = dict(algorithm={'name': method, option: 0.2})
    assert with_moved_entries(stored) == stored
    assert experiment.algorithm_config(method, **{option: 0.2})[option] == 0.2
  # Entries of other sections are not a method's options.
  assert new_name('partition.alpha', 'fedgkt') == ''
  assert new_name('alpha') == new_name('algorithm.alpha') == ''


def test_one_name_has_one_meaning():
  """No old name is left, and only methods with a proximal term have `mu`."""
  for method, old, new in OLD:
    options = keyword_options(ALGORITHMS[method])
    assert new in options and old not in options
  having = {
      name: {m for m, fn in ALGORITHMS.items() if name in keyword_options(fn)}
      for name in ('mu', 'rho', 'gamma')
  }
  assert having['mu'] == {'fedasync', 'fedat', 'fedin', 'fednova', 'fedprox'}
  assert not having['rho'] and not having['gamma']


class Before(NamedTuple):
  weights: Any
  model: Any


class Now(NamedTuple):
  small: Any
  model: Any


class Sent(NamedTuple):
  model: Any


@pytest.mark.parametrize('reader', [Checkpoints, SharedCheckpoints])
def test_a_checkpoint_with_an_old_field_is_read(tmp_path, reader):
  tree = {'stem': jnp.arange(3.0)}
  for i, (old, new) in enumerate((
      (Before(tree, {'stem': jnp.ones(2)}), Now),
      (Before(tree, ()), Sent),
  )):  # fmt: skip
    writer = Checkpoints(tmp_path / str(i))
    writer.save(1, dict(server=old, held=tree), {})
    writer.close()
    fields = [part for part in old if part != ()]
    like = jax.tree.map(jnp.zeros_like, dict(server=new(*fields), held=tree))
    checkpoints = reader(tmp_path / str(i))
    state = checkpoints.restore(like).state
    checkpoints.close()
    assert isinstance(state['server'], new)
    for got, want in zip(state['server'], fields, strict=True):
      np.testing.assert_array_equal(got['stem'], want['stem'])


def test_a_block_called_weights_is_no_field():
  paths = ['server/params/weights/kernel', 'server/model/x']
  assert current_paths(paths, paths) == {path: path for path in paths}
  # If the states differ, nothing is renamed; the reader names missing arrays.
  assert current_paths(['a/weights/x'], ['a/y']) == {
      'a/weights/x': 'a/weights/x'
  }


def test_stored_cells_have_the_options_of_this_version():
  """The stored cells of FD and FedHe have the old names."""
  found = set()
  for path in ROOT.glob('results/fedhe_*/cells/*-0.json'):
    stored = json.loads(path.read_text())['config']
    section = with_new_entries(stored)['algorithm']
    method = section.pop('name')
    assert {*section} == {*keyword_options(ALGORITHMS[method])}, path
    found |= {(method, old) for old in stored['algorithm']} - {
        (method, new) for new in section
    }
  assert {('fd', 'gamma'), ('fedhe', 'alpha')} <= found
