"""Experiments on users' data, registered sources and partitions."""

import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.data import catalog
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.data.raw_formats import Splits
from fedjax_het.experiment.workdir import new_workdir
from tests.experiment.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures('undrawn')

COLUMNS = 6


def table(num, seed=0):
  """Rows of two classes, with columns of very different scales."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, 2, num)
  x = rng.normal(size=(num, COLUMNS)) + y[:, None]
  return (x * 10.0 ** np.arange(COLUMNS) + 1e4).astype(np.float64), y


@pytest.fixture
def config(tmp_path):
  """Tiny dense models on a table of floats."""
  (x, y), (x_test, y_test) = table(150), table(200, seed=1)
  path = tmp_path / 'table.npz'
  np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
  config = tiny_config('fedavg', dataset='npz', data_file=str(path))
  config.num_rounds = config.checkpoint_every = 3
  config.local.epochs = 5
  config.local.learning_rate = 1e-2
  config.groups.large.depth = 2
  config.partition = dict(name='iid', seed=0)
  return config


def test_a_table_of_floats_is_standardised_and_learnt(config, tmp_path):
  built = experiment.build(config)
  x = np.asarray(built.data.images)
  assert x.dtype == np.float32 and x.shape == (150, COLUMNS)
  inputs = np.asarray(built.preprocess(x))
  np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-2)
  np.testing.assert_allclose(inputs.std(axis=0), 1, atol=1e-2)
  result = experiment.run(config, tmp_path / 'run')
  before, *_, after = [row for row in result.rows if row['split'] == 'test']
  assert after['accuracy'] > max(0.8, before['accuracy'] + 0.1)
  # A run can be resumed after its file has moved.
  moved = tmp_path / 'moved.npz'
  (tmp_path / 'table.npz').rename(moved)
  config.data_file = str(moved)
  again = experiment.run(config, tmp_path / 'run')
  assert again.rows == result.rows
  np.savez(moved, **{**np.load(moved), 'y_test': 1 - table(200, seed=1)[1]})
  with pytest.raises(ValueError, match='check data_dir and data_file'):
    experiment.run(config, tmp_path / 'run')


def test_integers_that_no_model_takes_as_tokens_give_a_warning(
    config, caplog
):
  experiment.build(config)
  assert 'not normalised' not in caplog.text
  with np.load(config.data_file) as found:
    arrays = {k: v.astype(np.int64) for k, v in found.items()}
  np.savez(config.data_file, **arrays)
  experiment.build(config)
  assert 'npz are int32 and are not normalised; save pixels' in caplog.text


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(local__augment='crop_flip'), 'augment=.*is for images'),
        (dict(image_size=8), 'image_size=8 is for images'),
        (dict(groups__small=dict(model='mini_resnet6', clients=3)),
         r"groups\.small: input_shape of model 'mini_resnet6' must be "),
        (dict(dataset='digits'), "data_file is for dataset='npz', got"),
        (dict(dataset='npy'), "Unknown dataset 'npy'; did you mean 'npz'"),
        (dict(data_file=None), 'npz needs data_file'),
        (dict(data_file='/no/where.npz'), 'no/where.npz: no such file'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(config, changes, message):
  for name, value in changes.items():
    *sections, key = name.split('__')
    section = config
    for part in sections:
      section = section[part]
    with config.unlocked(), config.ignore_type():
      section[key] = value
  config.model = dict(hidden=8)
  with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
    experiment.build(config)
  assert '\n' not in str(error.value)


def test_sources_and_partitions_may_be_registered_after_the_import(
    monkeypatch, config
):
  _, y = table(150)
  splits = Splits(
      np.zeros((150, 2, 2, 1), np.uint8), y.astype(np.int32),
      np.zeros((4, 2, 2, 1), np.uint8), np.array([0, 1, 0, 1], np.int32),
  )  # fmt: skip
  monkeypatch.setitem(
      catalog.DATASETS,
      'mine',
      catalog.Source((2, 2, 1), 2, 150, 4, lambda folder: splits),
  )

  def every_fifth(labels, num_clients, *, seed, first: int = 0):
    return [
        np.arange(first + k, len(labels), num_clients, dtype=np.int32)
        for k in range(num_clients)
    ]

  monkeypatch.setitem(PARTITIONS, 'every_fifth', every_fifth)
  config.dataset, config.data_file = 'mine', None
  config.partition = dict(name='every_fifth', seed=0, first=2)
  built = experiment.build(config)
  assert built.parts[1].tolist() == list(range(3, 150, 5))
  config.partition = dict(name='every_fifth', seed=0, first=0.5)
  with pytest.raises(ValueError, match=r'^partition\.first must be an int'):
    experiment.check(config)


def test_a_name_with_a_slash_makes_one_folder(config, tmp_path):
  config.dataset = 'tfds:flowers/small'
  name = new_workdir(config, tmp_path).relative_to(tmp_path)
  assert len(name.parts) == 1 and 'tfds_flowers_small' in str(name)
