"""A report's sections on accuracy by class and on single clients."""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from fedjax_het.analysis import pictures
from fedjax_het.engine.confusion import class_accuracy
from fedjax_het.engine.task import Metric
from fedjax_het.reporting import tables
from fedjax_het.reporting.confusion_file import Confusion
from fedjax_het.reporting.run_files import Row
from fedjax_het.reporting.summary import main_metric

_TEXT = (
    'Accuracy on the test examples of each class after round {round}, the mean '
    'over the evaluated models of a group; `confusion.npz` holds the counts of '
    'each model.'
)
_ROWS = 'A row of the picture is a true class, in shares of its test examples.'


def table(confusion: Confusion) -> tables.Table:
  """Accuracy by class and group, and the mean over groups.

  Args:
    confusion: The last evaluation's matrices.

  Returns:
    The table, one line per class; '-' for a class without test examples.
  """
  matrices = _ordered(confusion)
  values = [class_accuracy(counts).mean(axis=0) for counts in matrices.values()]
  if len(values) > 1:
    values.append(np.mean(values, axis=0))
  sizes = next(iter(matrices.values()))[0].sum(axis=1)
  names = [*matrices, 'mean over groups'][: len(values)]
  return [['class', 'test examples', *names]] + [
      [
          str(number), f'{size:,}',
          *(tables.percent(v[number]) if size else '-' for v in values),
      ]
      for number, size in enumerate(sizes)
  ]  # fmt: skip


def sections(
    confusion: Confusion | None, drawn: Mapping[str, str]
) -> list[str]:
  """The paragraphs on classes and on single clients.

  Args:
    confusion: The last evaluation's matrices; None if there are none.
    drawn: {name: path} of the pictures that were drawn.

  Returns:
    The paragraphs; [] if there are none.
  """
  parts = []
  if 'clients' in drawn:
    parts += [f'![Result of each client]({drawn["clients"]})']
  if confusion is None:
    return parts
  parts += ['## By class', _TEXT.format(round=confusion.round_num)]
  parts += [tables.as_markdown(table(confusion))]
  if 'confusion' in drawn:
    parts += [_ROWS, f'![Confusion matrix]({drawn["confusion"]})']
  return parts


def content(
    confusion: Confusion | None, last: Row, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """Arrays for the pictures on classes and clients; nothing is drawn.

  Args:
    confusion: The last evaluation's matrices; None if there are none.
    last: The row of the last evaluation.
    facts: The run's facts.

  Returns:
    {name: content}: `classes`, the heat maps of clients by classes; `clients`,
    results of each client, if some have models or test examples of their own;
    `confusion`, if there are matrices.
  """
  found: dict[str, Any] = {'classes': _maps(confusion, facts)}
  if strips := _strips(last, facts):
    found['clients'] = strips
  if confusion is not None:
    found['confusion'] = _shares(confusion)
  return found


def draw(
    folder: pathlib.Path, found: Mapping[str, Any], metric: Metric
) -> dict[str, str]:
  """Draws the pictures on classes and clients.

  Args:
    folder: The workdir.
    found: See `content`.
    metric: The task's main metric.

  Returns:
    {name: file}.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  files = {name: f'{name}.png' for name in found}
  pictures.draw_heat_maps(found['classes'], folder / files['classes'])
  if 'clients' in found:
    pictures.draw_strips(
        found['clients'],
        folder / files['clients'],
        metric.name.capitalize(),
        percent=metric.percent,
    )
  if 'confusion' in found:
    matrices = found['confusion']
    pictures.draw_matrices(
        matrices, range(len(next(iter(matrices.values())))),
        folder / files['confusion'], xlabel='Predicted class',
        ylabel='True class', downwards=True,
    )  # fmt: skip
  return files


def _ordered(confusion: Confusion) -> dict[str, np.ndarray]:
  """{group: [E, C, C]} in the natural order of groups."""
  return {
      group: confusion.counts[group]
      for group in pictures.group_looks(confusion.counts)
  }


def _shares(confusion: Confusion) -> dict[str, np.ndarray]:
  """{group: [C, C]}: shares of each true class, averaged over its models.

  If all groups have equal matrices, as with one model for all, one is shown.
  """
  shares = {}
  for group, counts in _ordered(confusion).items():
    mean = counts.mean(axis=0)
    total = mean.sum(axis=1, keepdims=True)
    shares[group] = np.divide(
        mean, total, out=np.full(mean.shape, np.nan), where=total > 0
    )
  first, *others = shares.values()
  if others and all(np.array_equal(first, m, equal_nan=True) for m in others):
    return {'All groups': first}
  return shares


def _maps(confusion: Confusion | None, facts) -> dict[str, np.ndarray]:
  """Class shares of each client and, if clients have models, their accuracy."""
  held = np.array(facts['partition'], float)
  size = held.sum(axis=1, keepdims=True)
  shares = held / np.maximum(size, 1)
  maps = {"Share of each client's training examples": shares}
  if confusion is not None and _personal(facts, confusion.client_id.values()):
    known = np.full(held.shape, np.nan)
    for group, counts in confusion.counts.items():
      known[confusion.client_id[group]] = class_accuracy(counts)
    maps["Test accuracy of each client's model"] = known
  return maps


def _strips(last: Row, facts) -> dict[str, dict[str, np.ndarray]]:
  """Results per client, if clients have their own models or test examples."""

  def by_group(key):
    return {
        group: np.array(last[key.format(group)], float)
        for group in facts['groups']
        if key.format(group) in last
    }

  found = {}
  whole = by_group(main_metric(facts).name + '/{}/models')
  if whole and _personal(facts, whole.values()):
    found['On the whole test set'] = whole
  if own := by_group('personal/clients/{}'):
    found['On own test examples'] = own
  return found


def _personal(facts, of_groups) -> bool:
  """Whether clients have models of their own.

  Args:
    facts: The run's facts; those of older runs do not say it.
    of_groups: Something for each evaluated client, by group.
  """
  several = any(len(of_group) > 1 for of_group in of_groups)
  return facts.get('personal', several)
