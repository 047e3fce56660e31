"""Facts of a run before its first round: sizes, bytes, versions."""

from collections.abc import Iterable, Mapping, Sequence
import json
import logging
import math
import pathlib
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.sources import Dataset
from fedjax_het.engine.task import ACCURACY
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.experiment.build import Experiment
from fedjax_het.files import read_json, write_atomically
from fedjax_het.names import natural_key

_log = logging.getLogger(__name__)
# Facts that runs of older versions did not store.
_NEW = {'personal', 'data'}


def _count(tree) -> int:
  """The number of elements in a tree of arrays or shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _crc(arrays: Iterable[np.ndarray], crc: int = 0) -> int:
  """The CRC-32 of arrays in turn, after that of others."""
  for array in arrays:
    crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view('u1'), crc)
  return crc


def data_crc(data: Dataset) -> int:
  """The CRC-32 of all arrays of a data set in turn."""
  return _crc((
      data.train_images, data.train_labels, data.test_images, data.test_labels,
  ))  # fmt: skip


def fingerprint(experiment: Experiment) -> dict[str, int]:
  """CRC-32s that identify the data and the partition.

  Args:
    experiment: The experiment.

  Returns:
    `data`, of all arrays and the clients' examples in turn; `sizes`, of the
    number of examples of each client; and `own_tests`, of the clients' test
    examples, if they have some. Checkpoints of older versions lack the last
    two.
  """
  parts, own = experiment.parts, experiment.own_tests
  found = dict(
      data=_crc(parts, data_crc(experiment.dataset)), sizes=_sizes(parts)
  )
  if own is not None:
    found['own_tests'] = _crc(own, _sizes(own))
  return found


def _sizes(parts: Sequence[np.ndarray]) -> int:
  """The CRC-32 of the clients' numbers of examples."""
  return _crc([np.array([len(part) for part in parts], '<i8')])


def is_of(notes: Mapping[str, Any], found: Mapping[str, int]) -> bool:
  """Whether the notes of a checkpoint are of a `fingerprint`."""
  return all(notes.get(name, crc) == crc for name, crc in found.items())


def versions() -> dict[str, str]:
  """Versions and hardware that may change the last bits of a result."""
  device = jax.devices()[0]
  return dict(
      jax=jax.__version__, platform=device.platform, device=device.device_kind
  )


def measure(experiment: Experiment) -> dict[str, Any]:
  """Facts for the report, as JSON values; computes no arrays.

  Args:
    experiment: The experiment.

  Returns:
    `groups`, in natural order: {name: model, clients, parameters (of all that
    a client trains), statistics (running statistics of norms), client_bytes
    (what one client keeps between its visits)}; `server_bytes`; `cohort_size`;
    `partition`, counts [clients, classes]; `group_of` [clients];
    `test_examples`; `versions`; `metric`, the task's main metric, unless it is
    accuracy; `personal`, whether each client has a model of its own; `data`,
    the CRC-32 of the data set.
  """
  federation, algorithm = experiment.federation, experiment.algorithm
  key = jax.random.key(0)
  groups = {}
  group_of = [''] * federation.num_clients
  for group in sorted(federation.groups, key=lambda g: natural_key(g.name)):
    trained = [
        model.abstract_variables for model in algorithm.trained_models(group)
    ]
    client = jax.eval_shape(
        lambda key, group=group: algorithm.init_client(
            group, jnp.int32(0), key
        ),
        key,
    )
    groups[group.name] = dict(
        model=group.model.name,
        clients=group.num_clients,
        parameters=_count([variables.params for variables in trained]),
        statistics=_count([variables.stats for variables in trained]),
        client_bytes=full_bytes(client),
    )
    for client_id in group.client_ids:
      group_of[client_id] = group.name
  labels = experiment.dataset.train_labels
  num_classes = experiment.dataset.num_classes
  main = federation.task.main
  return dict(
      groups=groups,
      group_of=group_of,
      server_bytes=full_bytes(jax.eval_shape(algorithm.init, key)),
      cohort_size=experiment.cohort_size,
      partition=[
          np.bincount(labels[part], minlength=num_classes).tolist()
          for part in experiment.parts
      ],
      test_examples=len(experiment.dataset.test_labels),
      personal=algorithm.personal,
      data=data_crc(experiment.dataset),
      versions=versions(),
      # No metric means accuracy, as in the facts of older runs.
      **({} if main == ACCURACY else dict(metric=main._asdict())),
  )


def stored(path: pathlib.Path, facts: dict[str, Any]) -> dict[str, Any]:
  """The stored facts of a run that does not continue, or those just measured.

  Args:
    path: facts.json, which is rewritten if it is damaged or missing.
    facts: What `measure` has returned.

  Returns:
    The facts.
  """
  facts = json.loads(json.dumps(facts))
  try:
    found = read_json(path, 'it is measured again')
  except FileNotFoundError:
    found = {}
  except ValueError as e:
    _log.warning('%s', e)
    found = {}
  if found:
    for name in _NEW - found.keys():
      found[name] = facts[name]
  # Keep the versions of the finished rounds; other facts must be equal.
  differ = [k for k in facts if k != 'versions' and found.get(k) != facts[k]]
  if not differ and isinstance(found.get('versions'), dict):
    return found
  if found:
    _log.warning(
        '%s is damaged or of another version (%s); it is measured again.',
        path, ', '.join(differ or ['versions']),
    )  # fmt: skip
  write_atomically(path, json.dumps(facts))
  return facts
