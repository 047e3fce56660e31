"""FedGen's uploads: classifiers are kept apart, all else is summed."""

from typing import Any, NamedTuple

import jax

from fedjax_het.aggregation.exchange import Delta, WeightExchange, end_of
from fedjax_het.aggregation.uploads import sum_uploads
from fedjax_het.engine.types import Group, Received, Uplink
from fedjax_het.models.blocks import BlockModel, Variables


class Kept(NamedTuple):
  """The part of an upload that is stored per client.

  Attributes:
    classifier: The `Delta` of the classifier.
    counts: [C] float32, c_k.
  """

  classifier: Delta
  counts: jax.Array


class Heads(NamedTuple):
  """The classifiers that a group's clients have sent.

  Attributes:
    model: The group's model.
    params: {block: tree} of its classifier, leaves [S, ...].
  """

  model: BlockModel
  params: dict[str, Any]


def split_classifier(
    exchange: WeightExchange, group: Group, delta: Delta, counts
) -> Uplink:
  """A client's upload.

  Args:
    exchange: The shared blocks.
    group: The client's group.
    delta: The change of all blocks that travel.
    counts: [C] float32, c_k.

  Returns:
    The change without the classifier, to be summed, and a `Kept`.
  """
  key_of = exchange.sharing.keys(group)
  keys = {key_of[name] for name in group.model.classifier}
  params, stats = delta.change, delta.stats
  rest = {key: tree for key, tree in params.items() if key not in keys}
  head = {key: params[key] for key in sorted(keys)}
  classifier = delta._replace(change=head, stats={})
  return Uplink(Variables(rest, stats), Kept(classifier, counts))


def sent_heads(
    exchange: WeightExchange, group: Group, model, received: Received
) -> Heads:
  """The classifiers of a group's clients after their training.

  Args:
    exchange: The shared blocks.
    group: The group.
    model: The server's tree, see `end_of` for stale uploads.
    received: Their uploads.

  Returns:
    The classifiers; in padding slots, the server's.
  """
  x = exchange.download(model, group).params
  deltas = received.kept.classifier
  before = Variables({key: x[key] for key in deltas.change}, {})
  after = jax.vmap(lambda delta: end_of(before, delta))(deltas)
  return Heads(group.model, exchange.sharing.join(group, (), after).params)


def whole_delta(received: Received) -> Delta:
  """The sum of a group's changes, classifiers included."""
  rest = received.summed
  head, _, weight = sum_uploads(received.kept.classifier)
  return Delta({**rest.params, **head}, rest.stats, weight)
