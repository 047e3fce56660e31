"""Tiny experiments that train in milliseconds, for the tests of this folder."""

import contextlib
import json

import ml_collections
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.analysis import pictures
from fedjax_het.engine.needs import needs_of
from fedjax_het.experiment import runner


def tiny_config(algorithm='fedavg', **changes):
  """Two dense architectures, five clients, four rounds of digits."""
  config = experiment.default_config(algorithm)
  config.groups = ml_collections.ConfigDict(
      dict(
          small=dict(model='mlp', depth=2, clients=3),
          large=dict(model='mlp', depth=3, clients=2),
      )
  )
  config.model = ml_collections.ConfigDict(dict(hidden=8, norm='batch'))
  config.local.epochs = 1
  config.num_rounds = 4
  config.checkpoint_every = 2
  config.cohort_size = 4
  config.compilation_cache = False  # The tests set their own folder.
  needs = needs_of(ALGORITHMS[algorithm])
  if needs.public is not None:
    config.public_size = 100
  if needs.one_model:
    config.groups.large.depth = 2
  if algorithm == 'fedmd':
    config.algorithm.pretrain_epochs = 2
    config.algorithm.transfer_epochs = 2
    # No early stopping, which its own tests cover: less to compile.
    config.algorithm.pretrain_patience = 0
    config.algorithm.transfer_patience = 0
  if algorithm == 'fedgkt':
    config.algorithm.server_epochs = 1
  if needs.server_model:
    config.server_model = 'mlp'
  for name, value in changes.items():
    section, _, key = name.rpartition('__')
    (config[section] if section else config)[key] = value
  return config


@contextlib.contextmanager
def compiled_once():
  """Runs of one config share their programs.

  Programs with a state are not shared: those with the plan of a clock, or with
  the rows of the next cohort.
  """
  made, compile_programs = {}, runner.compile_programs

  def once(built, driver, state):
    config = built.config
    if config.client_store != 'device' or config.clock.mode != 'synchronous':
      return compile_programs(built, driver, state)
    key = config.to_json()
    if key not in made:
      made[key] = compile_programs(built, driver, state)
    return made[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(runner, 'compile_programs', once)
    yield


@contextlib.contextmanager
def without_pictures():
  """Reports have no pictures, which take longer than a tiny run."""
  with pytest.MonkeyPatch.context() as patch:
    for name in filter(lambda n: n.startswith('draw_'), pictures.__all__):
      patch.setattr(pictures, name, lambda *args, **kwargs: None)
    yield


def without_seconds(path):
  """The rows of a metrics file, without their wall times."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    assert row.pop('seconds') >= 0
  return rows
