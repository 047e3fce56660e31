"""Rows of FedIN v2's Table 1 share initial models, partition and cohorts."""

import functools

import jax
import numpy as np
import pytest

from fedjax_het.engine.cohort import sample_cohort
from fedjax_het.experiment.build import build
from fedjax_het.experiment.programs import run_keys
from launch.table_files import find_table

ROWS = tuple(find_table('fedin_v2_table1').table.rows)
# Methods whose clients train submodels of one global model.
PARTS_OF_ONE_NET = ('HeteroFL', 'FedRolex', 'ScaleFL')
# Entries that decide partition, groups, cohorts, parameters and training.
DRAWN_FROM = (
    'seed', 'sampling_seed', 'group_seed', 'cohort_size', 'num_rounds',
    'partition', 'dataset', 'train_size', 'local',
)  # fmt: skip


def first_weights(experiment, key):
  """{(group, leaf): values} of the first client's model before round 1."""
  algorithm, found = experiment.algorithm, {}
  server = algorithm.init(key)
  for group in experiment.federation.groups:
    client = algorithm.init_client(group, group.client_ids[0], key)
    evaluated = algorithm.client_model(server, client, group)
    # Fed-ET's is a tuple that also holds the server's model.
    variables = evaluated[0] if type(evaluated) is tuple else evaluated
    for path, leaf in jax.tree.leaves_with_path(variables):
      found[group.name, jax.tree_util.keystr(path)] = np.asarray(leaf)
  return found


@functools.cache
def start(row):
  """A row's experiment with cohorts of three, its cohorts and parameters."""
  table = find_table('fedin_v2_table1', 'quick').table
  config = table.config(row, table.columns[-1])
  config.cohort_size = 3
  experiment = build(config)
  init_key, _, sampling_key = run_keys(config)
  clients = experiment.federation.num_clients
  cohorts = [
      sample_cohort(sampling_key, r, clients, 3).tolist() for r in range(3)
  ]
  return experiment, cohorts, first_weights(experiment, init_key)


@pytest.mark.parametrize('row', ROWS)
def test_a_row_starts_as_fedavg(row):
  fedavg, cohorts, weights = start('FedAvg')
  experiment, its_cohorts, its_weights = start(row)
  assert its_cohorts == cohorts and len(set(map(tuple, cohorts))) > 1
  if experiment.config.public_size is None:
    assert all(map(np.array_equal, experiment.parts, fedavg.parts))
  else:
    # The partition covers all examples that are not public.
    private = np.sort(np.concatenate(experiment.parts))
    total = len(experiment.dataset.train_labels)
    assert len(private) == total - experiment.config.public_size
    assert set(private.tolist()).isdisjoint(experiment.data.public.tolist())
  if row not in PARTS_OF_ONE_NET:
    assert its_weights.keys() >= weights.keys()
    for name, leaf in weights.items():
      np.testing.assert_array_equal(its_weights[name], leaf, str(name))


@pytest.mark.parametrize('scale', ['cpu', 'full'])
def test_rows_are_drawn_from_the_same_entries(scale):
  table = find_table('fedin_v2_table1', scale).table
  for column in table.columns:
    fedavg = table.config('FedAvg', column)
    for row in table.rows:
      config = table.config(row, column)
      for entry in DRAWN_FROM:
        assert config[entry] == fedavg[entry], (row, column, entry)
      assert (row in PARTS_OF_ONE_NET) == (config.groups != fedavg.groups)
      assert (row == 'FedET') == (config.public_size is not None)
