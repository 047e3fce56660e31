"""Metrics and loss of group or client models on the global test set.

`own_test` evaluates clients on their own test examples.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import arrays
from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import confusion, placement
from fedjax_het.engine.mapping import Backend, batched_lowering
from fedjax_het.engine.own_test import OwnScores, make_own_test
from fedjax_het.engine.rounds import State
from fedjax_het.engine.streaming import run_rows
from fedjax_het.engine.task import ACCURACY, Task
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Group
from fedjax_het.engine.visits import check_inputs


class Scores(NamedTuple):
  """Test results of one group; E models are evaluated.

  Attributes:
    client_id: [E] int32, the models' clients; the group's first client if one
      model serves the whole group.
    metrics: {name: [E] float32}, means of the task's metrics.
    loss: [E] float32, mean loss.
    views: {name: [E] float32}, the task's main metric of each of the
      algorithm's views.
    own: Results of the group's clients on their own test examples; None where
      there are none.
    confusion: [E, C, C] float32 whole numbers, test examples by true class
      (rows) and predicted class; None for a task without classes.
  """

  client_id: np.ndarray
  metrics: dict[str, jax.Array]
  loss: jax.Array
  views: dict[str, jax.Array] = {}
  own: OwnScores | None = None
  confusion: jax.Array | None = None

  @property
  def accuracy(self) -> jax.Array:
    """[E] float32 in [0, 1]; for classification tasks only."""
    return self.metrics[ACCURACY.name]


def pad_batches(
    images,
    labels,
    batch_size: int,
    multiple: int = 1,
    num_classes: int | None = None,
):
  """Cuts a test set into equal batches, and pads the last one.

  Args:
    images: [N, ...] features, such as images [N, H, W, C] uint8.
    labels: [N, ...] integers or real numbers.
    batch_size: Examples a batch, B.
    multiple: The number of batches S is rounded up to a multiple of this, with
      batches of padding.
    num_classes: See `arrays.labels`.

  Returns:
    Arrays [S, B, ...], [S, B, ...] and [S, B] bool (False for padding).

  Raises:
    ValueError: See `arrays.features` and `arrays.labels`.
  """
  images = arrays.features(images, 'test images')
  labels = arrays.labels(labels, len(images), num_classes, 'test labels')
  num = len(labels)
  if not num:
    raise ValueError('The test set has no example.')
  steps = -(-num // (batch_size * multiple)) * multiple
  # Padding repeats examples, so that it does not distort batch statistics.
  place = np.arange(steps * batch_size) % num
  mask = np.arange(steps * batch_size) < num
  shape = (steps, batch_size)
  return (
      jnp.asarray(images[place]).reshape(*shape, *images.shape[1:]),
      jnp.asarray(labels[place]).reshape(*shape, *labels.shape[1:]),
      jnp.asarray(mask).reshape(shape),
  )


def make_evaluate(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    images: np.ndarray | jax.Array,
    labels: np.ndarray | jax.Array,
    preprocess: Callable[..., jax.Array],
    *,
    batch_size: int = 500,
    clients_per_group: int | None = None,
    data: FederatedData | None = None,
    backend: str | Backend = 'auto',
    own_tests: FederatedData | None = None,
) -> Callable[[State], dict[str, Scores]]:
  """Builds the evaluation on the full test set.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    images: [N, ...] test features, such as [N, H, W, C] uint8 images.
    labels: [N] test labels.
    preprocess: Maps stored features to model inputs.
    batch_size: Examples a batch; results depend on it only for models that
      use batch statistics at test time.
    clients_per_group: For personal models, how many clients of each group are
      evaluated, evenly spread over the group; None for all.
    data: The clients' examples, for an algorithm that calibrates.
    backend: A `Backend`, or the name of one. Personal models are batched as
      clients are. With 'shard_map' personal models are divided over the
      devices; with one model a group, the test batches are.
    own_tests: Each client's own test examples, for the personalised evaluation
      of all clients or, with personal models, of those that
      `clients_per_group` selects. None for no such evaluation.

  Returns:
    `evaluate(state) -> {group name: Scores}`.

  Raises:
    ValueError: If the algorithm calibrates and there are no data, or the test
      set does not fit the models.
  """
  if algorithm.calibrate is not None and data is None:
    raise ValueError('This algorithm needs make_evaluate(data=...).')
  backend = Backend.of(backend)
  mesh, personal = backend.state_mesh, algorithm.personal
  by_batch = mesh is not None and not personal
  batches = _test_batches(
      federation, images, labels, preprocess, batch_size, mesh, by_batch
  )
  num = len(labels)
  # Results are replicated on a mesh, so every process has them.
  everywhere = None if mesh is None else placement.everywhere(mesh)
  program = functools.partial(jax.jit, out_shardings=everywhere)

  def score_rows(group: Group):
    """Builds `(server, clients, rows, batches) -> means and counts`."""
    count = _make_count(algorithm, federation.task, group, preprocess)
    counter = _count_rows(count, backend.at_once if personal else None)
    if mesh is not None:
      counter = (_by_batch if by_batch else _by_model)(counter, mesh)

    @program
    def run(server, clients, rows, batches):
      *totals, counts = counter(server, clients, rows, batches)
      return *jax.tree.map(lambda total: total / num, totals), counts

    return run

  first, *others = federation.groups
  evaluated = [first] if algorithm.one_model else [first, *others]
  programs = {group.name: score_rows(group) for group in evaluated}
  rows_of = {
      group.name: _evaluated_rows(group, personal, clients_per_group)
      for group in federation.groups
  }
  calibrate = None
  if algorithm.calibrate is not None:
    calibrate = program(algorithm.calibrate)
  own_test = None
  if own_tests is not None:
    own_test = make_own_test(
        algorithm,
        federation,
        own_tests,
        batch_size=batch_size,
        rows=rows_of if personal else None,
        backend=backend,
    )

  def evaluate(state: State) -> dict[str, Scores]:
    server, results = state.server, {}
    if calibrate is not None:
      server = calibrate(server, data)
    for group in evaluated:

      def score(clients, rows, run=programs[group.name]):
        return run(server, clients, rows, batches)

      results[group.name] = run_rows(
          score, state.clients[group.name], rows_of[group.name]
      )
    own = {} if own_test is None else own_test(server, state.clients)

    def scores(group: Group) -> Scores:
      *means, counts = results.get(group.name, results[first.name])
      ids = group.client_ids[rows_of[group.name]]
      return Scores(ids, *means, own.get(group.name), counts)

    return {group.name: scores(group) for group in federation.groups}

  return evaluate


def _test_batches(
    federation: Federation,
    images,
    labels,
    preprocess,
    batch_size: int,
    mesh,
    by_batch: bool,
):
  """The test set in batches, checked, and sharded if there is a mesh."""
  num_classes = None
  if federation.task.predicted is not None:
    num_classes = min(group.model.num_classes for group in federation.groups)
  batches = pad_batches(
      images,
      labels,
      batch_size,
      mesh.devices.size if by_batch else 1,
      num_classes,
  )
  one = jax.ShapeDtypeStruct(batches[0].shape[1:], batches[0].dtype)
  for group in federation.groups:
    check_inputs(group, preprocess, one)
  if mesh is None:
    return batches
  spec = jax.P('client') if by_batch else jax.P()
  return placement.put(batches, jax.sharding.NamedSharding(mesh, spec))


def _evaluated_rows(
    group: Group, personal: bool, clients_per_group: int | None
) -> np.ndarray:
  """Rows of the group's clients whose models are evaluated."""
  if not personal:
    return np.array([0])
  count = min(clients_per_group or group.num_clients, group.num_clients)
  return np.linspace(0, group.num_clients - 1, count).round().astype(int)


def _make_count(
    algorithm: FederatedAlgorithm, task: Task, group: Group, preprocess
):
  """Builds `(server, client, batches) -> results of a model`.

  Results are sums of metrics, losses and views, and the confusion matrix or
  None.
  """
  main_metric = task.metrics[task.main.name]
  num_classes = group.model.num_classes

  def count(server, client, batches):
    variables = algorithm.client_model(server, client, group)

    def step(totals, batch):
      x, y, mask = batch
      x = preprocess(x)

      def total(of_example, outputs):
        return jnp.sum(jnp.where(mask, of_example(outputs, y), 0.0))

      outputs = algorithm.predict(group, variables, x)
      found = (
          {name: total(fn, outputs) for name, fn in task.metrics.items()},
          total(task.losses, outputs),
          {
              name: total(main_metric, predict(group, variables, x))
              for name, predict in algorithm.views.items()
          },
          None
          if task.predicted is None
          else confusion.count(task.predicted(outputs), y, mask, num_classes),
      )
      return jax.tree.map(jnp.add, totals, found), None

    zero = jnp.float32(0.0)
    start = (
        dict.fromkeys(task.metrics, zero),
        zero,
        dict.fromkeys(algorithm.views, zero),
        None
        if task.predicted is None
        else jnp.zeros((num_classes, num_classes)),
    )
    return jax.lax.scan(step, start, batches)[0]

  return count


def _count_rows(count, at_once: int | None):
  """`count` for several clients, one by one or `at_once` in a batch."""

  def count_rows(server, clients, rows, batches):
    def one(row):
      client = jax.tree.map(lambda a: a[row], clients)
      return count(server, client, batches)

    if at_once is None:
      return jax.lax.map(one, rows)
    with batched_lowering():
      return jax.lax.map(one, rows, batch_size=at_once)

  return count_rows


def _by_batch(count_rows, mesh):
  """`count_rows` with the test batches divided over a mesh."""

  def local(server, clients, rows, batches):
    return jax.lax.psum(count_rows(server, clients, rows, batches), 'client')

  def run(server, clients, rows, batches):
    # One model serves the group, so that one row is enough.
    first = jax.tree.map(lambda a: a[:1], clients)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(), jax.P(), jax.P(), jax.P('client')),
        out_specs=jax.P(),
        check_vma=False,
    )(server, first, rows, batches)

  return run


def _by_model(count_rows, mesh):
  """`count_rows` with the models divided over a mesh."""
  devices = mesh.devices.size

  def run(server, clients, rows, batches):
    wanted, share = len(rows), -(-len(rows) // devices)
    rows = jnp.pad(rows, (0, devices * share - wanted), mode='edge')
    models = placement.take_rows(mesh, clients, rows)
    totals = jax.shard_map(
        lambda server, models, batches: count_rows(
            server, models, jnp.arange(share), batches
        ),
        mesh=mesh,
        in_specs=(jax.P(), jax.P('client'), jax.P()),
        out_specs=jax.P('client'),
        check_vma=False,
    )(server, models, batches)
    return jax.tree.map(lambda total: total[:wanted], totals)

  return run
