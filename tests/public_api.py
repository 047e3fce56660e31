"""A typed program on the public API, which mypy checks and nobody runs."""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import numpy as np
import optax

import fedjax_het as fh


def data_of(
    images: np.ndarray[Any, Any], labels: list[int]
) -> fh.FederatedData:
  parts = fh.partition(labels, 4, name='dirichlet', seed=0, alpha=0.5)
  preprocess = fh.make_preprocess(images)
  assert_type(preprocess, Callable[..., jax.Array])
  return fh.federate(images, np.asarray(labels), parts, preprocess)


def federation_of(depths: tuple[int, ...]) -> fh.Federation:
  models = [fh.create('mlp', (8, 8, 1), 10, depth=depth) for depth in depths]
  assert_type(models, list[fh.BlockModel])
  groups = tuple(
      fh.Group(model.name, model, np.array([k]))
      for k, model in enumerate(models)
  )
  local = fh.LocalTraining(
      optimizer=optax.adam,
      learning_rate=lambda round_num: 1e-3,
      epochs=1,
      batch_size=16,
  )
  return fh.Federation(groups, local)


def train(
    federation: fh.Federation, data: fh.FederatedData, key: jax.Array
) -> dict[str, float]:
  algorithm = fh.ALGORITHMS['fedavg'](federation, weights='data')
  assert_type(algorithm, fh.FederatedAlgorithm)
  state = fh.init_state(algorithm, federation, key)
  assert_type(state, fh.State)
  run_round = fh.make_round(algorithm, federation, cohort_size=2, backend='map')
  state, _ = run_round(state, data, key, key)
  images = np.zeros((2, 8, 8, 1))
  evaluate = fh.make_evaluate(
      algorithm, federation, images, np.zeros(2, int), data.preprocess
  )
  return {name: float(s.loss[0]) for name, s in evaluate(state).items()}


def variables_of(model: fh.BlockModel) -> fh.Variables:
  return model.init(jax.random.key(0), model.span(0, 2))


def a_run(workdir: str) -> str:
  result = fh.run(fh.default_config('fedin'), workdir)
  assert_type(result.finished, bool)
  return str(fh.load_run(workdir).groups)


def a_method(federation: fh.Federation) -> fh.FederatedAlgorithm:
  def client_update(
      group: fh.Group, client: Any, sent: Any, data: Any, visit: fh.Visit
  ) -> tuple[Any, fh.Uplink, dict[str, jax.Array]]:
    return client, fh.Uplink(()), {}

  return fh.FederatedAlgorithm(
      init=lambda key: (),
      init_client=lambda group, client_id, key: (),
      downlink=lambda server, group, visit: (),
      client_update=client_update,
      server_update=lambda server, received, turn: (server, {}),
      client_model=lambda server, client, group: client,
      personal=True,
  )
