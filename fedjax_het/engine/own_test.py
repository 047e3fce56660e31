"""Personalised evaluation: each client's model on its own test examples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import ClientData, FederatedData
from fedjax_het.engine import placement
from fedjax_het.engine.mapping import Backend, batched_lowering
from fedjax_het.engine.streaming import run_rows
from fedjax_het.engine.task import ACCURACY
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Group
from fedjax_het.engine.visits import check_clients, check_labels


class OwnScores(NamedTuple):
  """Results of one group's clients on their own test examples.

  Attributes:
    client_id: [E] int32, the evaluated clients.
    size: [E] int32, number of test examples of each; without examples the
      results are 0 and have no meaning.
    metrics: {name: [E] float32}, means of the task's metrics.
    loss: [E] float32, mean loss.
  """

  client_id: np.ndarray
  size: np.ndarray
  metrics: dict[str, jax.Array]
  loss: jax.Array

  @property
  def accuracy(self) -> jax.Array:
    """[E] float32 in [0, 1]; for classification tasks only."""
    return self.metrics[ACCURACY.name]


def make_own_test(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    tests: FederatedData,
    *,
    batch_size: int = 500,
    rows: dict[str, np.ndarray] | None = None,
    backend: str | Backend = 'auto',
) -> Callable[[Any, dict[str, Any]], dict[str, OwnScores]]:
  """Builds the personalised evaluation.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    tests: The test set with the examples of each client; a client may have
      none. Nothing is augmented.
    batch_size: Largest batch; results depend on it only for models that use
      batch statistics at test time.
    rows: {group: rows of its clients} that are evaluated; None for all.
    backend: A `Backend`, or the name of one. With 'shard_map' the clients are
      divided over the devices.

  Returns:
    `evaluate(server, clients) -> {group: OwnScores}`; `server` is the state
    after `calibrate` and `clients` are those of a `State`.

  Raises:
    ValueError: If a model has no output for the class of an example, or
      the test set is of another number of clients.
  """
  check_labels(federation, tests)
  check_clients(federation, tests)
  backend = Backend.of(backend)
  mesh = backend.state_mesh
  everywhere = None if mesh is None else placement.everywhere(mesh)
  sizes = np.asarray(tests.sizes)
  size = min(batch_size, max(int(sizes.max()), 1))
  if mesh is not None:
    tests = placement.put(tests, everywhere)

  def program(group: Group):
    score = _make_score(algorithm, federation, group, size)
    run = _over_clients(score, backend.at_once)
    if mesh is not None:
      run = _over_mesh(run, mesh)
    return jax.jit(run, out_shardings=everywhere)

  programs = {group.name: program(group) for group in federation.groups}

  def evaluate(server, clients) -> dict[str, OwnScores]:
    found = {}
    for group in federation.groups:
      mine = np.arange(group.num_clients) if rows is None else rows[group.name]
      ids = group.client_ids[mine]
      run, table = programs[group.name], clients[group.name]

      def score(clients, rows, ids, run=run):
        return run(server, clients, rows, ids, tests)

      results = run_rows(score, table, mine, ids)
      found[group.name] = OwnScores(ids, sizes[ids], *results)
    return found

  return evaluate


def _make_score(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    group: Group,
    batch_size: int,
):
  """Builds `(server, client, data) -> (means of metrics, mean loss)`."""
  task = federation.task

  def score(server, client, data: ClientData):
    variables = algorithm.client_model(server, client, group)
    least_one = jnp.maximum(data.size, 1)

    def add(step, totals):
      place = step * batch_size + jnp.arange(batch_size)
      # Padding repeats examples, so that it does not distort batch statistics.
      batch = data.batch(place % least_one, place < data.size)
      outputs = algorithm.predict(group, variables, batch.x)

      def total(of_example):
        values = of_example(outputs, batch.y)
        return jnp.sum(jnp.where(batch.mask, values, 0.0))

      found = (
          {name: total(fn) for name, fn in task.metrics.items()},
          total(task.losses),
      )
      return jax.tree.map(jnp.add, totals, found)

    zero = jnp.float32(0.0)
    start = dict.fromkeys(task.metrics, zero), zero
    steps = -(-data.size // batch_size)
    totals = jax.lax.fori_loop(0, steps, add, start)
    return jax.tree.map(lambda total: total / least_one, totals)

  return score


def _over_clients(score, at_once: int | None):
  """`score` of several clients, one by one or `at_once` in a batch."""

  def run(server, clients, rows, ids, tests: FederatedData):
    def one(arg):
      row, client_id = arg
      client = jax.tree.map(lambda leaf: leaf[row], clients)
      return score(server, client, tests.client(client_id))

    if at_once is None:
      return jax.lax.map(one, (rows, ids))
    with batched_lowering():
      return jax.lax.map(one, (rows, ids), batch_size=at_once)

  return run


def _over_mesh(run, mesh):
  """`run` with the clients divided over a mesh."""
  devices = mesh.devices.size

  def spread(server, clients, rows, ids, tests):
    wanted, share = len(rows), -(-len(rows) // devices)
    rows, ids = (
        jnp.pad(a, (0, devices * share - wanted), mode='edge')
        for a in (rows, ids)
    )
    states = placement.take_rows(mesh, clients, rows)
    results = jax.shard_map(
        lambda server, states, ids, tests: run(
            server, states, jnp.arange(share), ids, tests
        ),
        mesh=mesh,
        in_specs=(jax.P(), jax.P('client'), jax.P('client'), jax.P()),
        out_specs=jax.P('client'),
        check_vma=False,
    )(server, states, ids, tests)
    return jax.tree.map(lambda a: a[:wanted], results)

  return spread
