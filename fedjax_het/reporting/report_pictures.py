"""The pictures of report.md."""

import logging

import numpy as np

from fedjax_het.analysis import pictures
from fedjax_het.reporting import class_report
from fedjax_het.reporting.setting import named
from fedjax_het.reporting.summary import main_metric, summarise

_log = logging.getLogger(__name__)

NO_MATPLOTLIB = (
    'No pictures: matplotlib cannot be imported (`pip install matplotlib`)'
)
NO_PICTURES = f'{NO_MATPLOTLIB}; `fedjax-het report` then adds them.'
_MEAN = 'mean over groups'
VIRTUAL_TIME = 'Virtual time (s)'
# In two lines, so that the labels of adjacent panels do not overlap.
CLIENT_BYTES = 'Sent and received by a client\nin the whole run (mean)'
# More than any data set has; otherwise a damaged count could fill the memory.
_MOST_EXAMPLES = 10**8


def draw(folder, config, facts, rows, confusion) -> dict[str, str]:
  """Draws the pictures.

  Args:
    folder: The workdir.
    config: Its config, as nested dicts.
    facts: Its facts.
    rows: Its metrics.
    confusion: The last evaluation's matrices; None if there are none.

  Returns:
    {picture: file name}; {} without matplotlib.

  Raises:
    ValueError: If the facts hold no counts of examples.
    OSError: If a picture cannot be written.
  """
  metric = main_metric(facts)
  summary = summarise(rows, None, metric)
  counts = np.array(facts['partition'], np.int64)
  if counts.ndim != 2 or counts.min() < 0 or counts.sum() > _MOST_EXAMPLES:
    raise ValueError('partition holds no counts of examples')
  title = f'{config["algorithm"]["name"]} on {config["dataset"]}'
  looks = {**pictures.group_looks(facts['groups']), _MEAN: pictures.MEAN_LOOK}
  by_round = {title: _curves(rows, facts)}
  by_class = class_report.content(confusion, summary.last, facts)
  # Labels and parts with these counts; the original indices do not matter.
  num_clients, num_classes = counts.shape
  labels = np.repeat(
      np.tile(np.arange(num_classes), num_clients), counts.reshape(-1)
  )
  ends = np.cumsum(counts.sum(axis=1))[:-1]
  parts = np.split(np.arange(len(labels)), ends)
  try:
    pictures.draw_partition(
        labels,
        parts,
        folder / 'partition.png',
        facts['group_of'],
        title=f'{config["dataset"]}, {named(config["partition"])}',
    )
    pictures.draw_curves(
        by_round,
        folder / 'curves.png',
        f'Test {metric.name}',
        looks=looks,
        percent=metric.percent,
    )
    drawn = dict(
        partition='partition.png',
        curves='curves.png',
        **class_report.draw(folder, by_class, metric),
    )
    if summary.virtual_time is None:
      return drawn
    pictures.draw_curves(
        {title: _curves(rows, facts, 'virtual_time')},
        folder / 'times.png',
        f'Test {metric.name}',
        looks=looks,
        xlabel=VIRTUAL_TIME,
        percent=metric.percent,
    )
  except ImportError:
    _log.info(NO_PICTURES)
    return {}
  return dict(drawn, times='times.png')


def _curves(
    rows, facts, over: str = 'round'
) -> dict[str, tuple[list[float], list[float]]]:
  """Curves of each group and, if there are several, the mean over groups."""
  tests = [row for row in rows if row['split'] == 'test']
  rounds = [row[over] for row in tests]
  groups = pictures.group_looks(facts['groups'])  # In natural order.
  main = main_metric(facts).name
  names = {name: f'{main}/{name}' for name in groups}
  if len(groups) > 1:
    names[_MEAN] = main
  return {
      label: (rounds, [or_nan(row[key]) for row in tests])
      for label, key in names.items()
  }


def or_nan(value: float | None) -> float:
  """A number as a float; NaN (a gap in a curve) for None."""
  return float('nan') if value is None else float(value)
