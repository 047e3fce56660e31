"""Accuracy and loss of group or client models on the global test set."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.rounds import State
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Group


class Scores(NamedTuple):
  """Test results of one group; E models are evaluated.

  Attributes:
    client_id: [E] int32, whose models they are; the group's first client
      stands for all where one model serves the group.
    accuracy: [E] float32 in [0, 1].
    loss: [E] float32, mean cross-entropy in nats.
    views: {name: [E] float32}, accuracies of the algorithm's further views.
  """

  client_id: np.ndarray
  accuracy: jax.Array
  loss: jax.Array
  views: dict[str, jax.Array] = {}


def pad_batches(images, labels, batch_size: int):
  """Cuts a test set into equal batches, the last one padded.

  Args:
    images: [N, H, W, C] uint8.
    labels: [N] integers.
    batch_size: Examples a batch, B.

  Returns:
    Arrays [S, B, H, W, C], [S, B] int32 and [S, B] bool (False for padding).
  """
  num = len(labels)
  steps = -(-num // batch_size)
  # Padding repeats examples, so that batch statistics stay sensible.
  place = np.arange(steps * batch_size) % num
  mask = np.arange(steps * batch_size) < num
  shape = (steps, batch_size)
  return (
      jnp.asarray(images[place]).reshape(*shape, *images.shape[1:]),
      jnp.asarray(labels[place], jnp.int32).reshape(shape),
      jnp.asarray(mask).reshape(shape),
  )


def make_evaluate(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    images,
    labels,
    preprocess: Callable[..., jax.Array],
    *,
    batch_size: int = 500,
    clients_per_group: int | None = None,
    data: FederatedData | None = None,
) -> Callable[[State], dict[str, Scores]]:
  """Builds the evaluation on the full test set.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    images: [N, H, W, C] uint8 test images.
    labels: [N] test labels.
    preprocess: Maps uint8 images to model inputs.
    batch_size: Examples a batch; results depend on it only for models that
      use batch statistics at test time.
    clients_per_group: For personal models, how many clients of each group are
      evaluated, evenly spread over the group; None for all.
    data: The clients' examples, for an algorithm that calibrates.

  Returns:
    `evaluate(state) -> {group name: Scores}`.

  Raises:
    ValueError: If the algorithm calibrates and there are no data.
  """
  if algorithm.calibrate is not None and data is None:
    raise ValueError('This algorithm needs make_evaluate(data=...).')
  batches = pad_batches(np.asarray(images), np.asarray(labels), batch_size)
  num = len(labels)

  def score(group: Group, variables: Any, batches):
    def step(totals, batch):
      x, y, mask = batch
      x = preprocess(x)

      def hits(logits):
        return jnp.sum((jnp.argmax(logits, -1) == y) & mask)

      logits = algorithm.predict(group, variables, x)
      loss = optax.softmax_cross_entropy_with_integer_labels(
          logits.astype(jnp.float32), y
      )
      views = {
          name: hits(predict(group, variables, x))
          for name, predict in algorithm.views.items()
      }
      found = hits(logits), jnp.sum(jnp.where(mask, loss, 0.0)), views
      return jax.tree.map(jnp.add, totals, found), None

    views = dict.fromkeys(algorithm.views, jnp.int32(0))
    start = (jnp.int32(0), jnp.float32(0.0), views)
    totals, _ = jax.lax.scan(step, start, batches)
    return jax.tree.map(lambda total: total / num, totals)

  first, *others = federation.groups
  evaluated = [first] if algorithm.one_model else [first, *others]

  def rows_of(group):
    if not algorithm.personal:
      return np.array([0])
    count = min(clients_per_group or group.num_clients, group.num_clients)
    return np.linspace(0, group.num_clients - 1, count).round().astype(int)

  @jax.jit
  def run(state, batches, data):
    results = {}
    server = state.server
    if algorithm.calibrate is not None:
      server = algorithm.calibrate(server, data)
    for group in evaluated:

      def one(row, group=group):
        client = jax.tree.map(lambda a: a[row], state.clients[group.name])
        model = algorithm.client_model(server, client, group)
        return score(group, model, batches)

      results[group.name] = jax.lax.map(one, jnp.asarray(rows_of(group)))
    return results

  def evaluate(state: State) -> dict[str, Scores]:
    results = run(state, batches, data)
    return {
        group.name: Scores(
            group.client_ids[rows_of(group)],
            *results.get(group.name, results[first.name]),
        )
        for group in federation.groups
    }

  return evaluate
