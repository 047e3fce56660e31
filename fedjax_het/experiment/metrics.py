"""Makes the lines of metrics.jsonl from reports of rounds and evaluations."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_het.engine.evaluate import Scores
from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.rounds import round_bytes
from fedjax_het.engine.task import Metric
from fedjax_het.engine.types import Federation
from fedjax_het.experiment import personal
from fedjax_het.reporting.run_files import Row


def _mean(values: Sequence[float | None]) -> float | None:
  """Mean of the values; None if there is none or one is None."""
  if not values or None in values:
    return None
  return float(np.mean(values))


def train_row(
    round_num: int,
    reports: RoundReport,
    federation: Federation,
    seconds: float,
    split: str = 'train',
) -> Row:
  """The line of a round's local training.

  Args:
    round_num: Rounds done, this one included.
    reports: What the round measured, on the host.
    federation: The federation.
    seconds: Wall time of the round.
    split: 'train', or 'warm_up' for the warm-up before the first round.

  Returns:
    For each client metric, `<name>/<group>` is the mean over the group's
    clients of this round, and `<name>` the mean of these over the groups that
    took part; `train_loss` is called `loss`. `clients`, `bytes_up` and
    `bytes_down` are totals, and `<name>/<group>` those of a group. `nonfinite`
    lists the clients whose update was not finite; the means leave them out.
    `server`, {name: number}, holds the metrics of the server's update, if any.
  """
  num_clients = federation.num_clients
  row: Row = {'round': round_num, 'split': split, 'seconds': seconds}
  groups: Row = {}
  values: dict[str, list[float | None]] = {}
  counts: Row = {'clients': 0, 'bytes_up': 0, 'bytes_down': 0}
  dropped: list[int] = []
  for group in federation.groups:
    report = reports[group.name]
    real = report.client_id < num_clients
    down, up = round_bytes(report, num_clients)
    own = dict(clients=int(real.sum()), bytes_up=up, bytes_down=down)
    for name, value in own.items():
      counts[name] += value
      groups[f'{name}/{group.name}'] = value
    dropped += report.client_id[real & ~report.finite].tolist()
    good = real & report.finite
    for name, metric in report.metrics.items():
      name = 'loss' if name == 'train_loss' else name
      if good.any():
        mean = personal.number(np.mean(metric[good], dtype=np.float64))
        groups[f'{name}/{group.name}'] = mean
        values.setdefault(name, []).append(mean)
  row['loss'] = None  # Unless a client reports one.
  row.update({name: _mean(means) for name, means in values.items()})
  row = {**row, **counts, 'nonfinite': dropped, **groups}
  if reports.server:
    row['server'] = {k: personal.number(v) for k, v in reports.server.items()}
  return row


def test_row(
    round_num: int,
    scores: Mapping[str, Scores],
    federation: Federation,
    seconds: float,
    virtual_time: float | None = None,
    split: str = 'test',
) -> Row:
  """The line of an evaluation on the global test set or held-out examples.

  Args:
    round_num: Rounds done; 0 before training.
    scores: {group: scores}.
    federation: The federation.
    seconds: Wall time of the evaluation.
    virtual_time: Seconds of the virtual clock; None without one.
    split: 'test', or 'validation' for examples that clients have held out.

  Returns:
    For `loss` (in nats for classification) and each of the task's metrics,
    `<name>/<group>` is the mean over the group's evaluated models, and `<name>`
    the mean of these over groups. `models/<group>` is the number of evaluated
    models. The task's main metric (`accuracy` in [0, 1] for classification) has
    further entries: `accuracy/<group>/models` lists the value of each model;
    `accuracy/worst` and `accuracy/<group>/worst` are the worst of them;
    `accuracy/clients` is the mean over clients, in which each group counts with
    its number of clients. Each further view of a method is
    `views/<view>/<group>` and, as mean over clients, `views/<view>`. Results of
    clients on their own test examples are those of `personal.entries`.
  """
  main, means, groups = federation.task.main, {}, {}
  for name in dict.fromkeys((*federation.task.metrics, 'loss')):
    for group, score in scores.items():
      found = score.metrics.get(name, score.loss)
      values = np.asarray(found, np.float64)
      groups[f'{name}/{group}'] = personal.number(values.mean())
    means[name] = _mean([groups[f'{name}/{group}'] for group in scores])
  for group, score in scores.items():
    models = np.asarray(score.metrics[main.name], np.float64).tolist()
    groups[f'{main.name}/{group}/worst'] = _worst(main, models)
    groups[f'{main.name}/{group}/models'] = [*map(personal.number, models)]
    groups[f'models/{group}'] = len(score.client_id)
  means[f'{main.name}/worst'] = _worst(
      main, [groups[f'{main.name}/{group}/worst'] for group in scores]
  )
  means[f'{main.name}/clients'] = _over_clients(groups, main.name, federation)
  for view in next(iter(scores.values())).views:
    for group in federation.groups:
      values = np.asarray(scores[group.name].views[view], np.float64)
      groups[f'views/{view}/{group.name}'] = personal.number(values.mean())
    means[f'views/{view}'] = _over_clients(groups, f'views/{view}', federation)
  row = {'round': round_num, 'split': split, 'seconds': seconds}
  if virtual_time is not None:
    row['virtual_time'] = virtual_time
  return {**row, **means, **groups, **personal.entries(scores, main)}


def _worst(metric: Metric, values: Sequence[float | None]) -> float | None:
  """The worst value; None if any value is None or it is not finite."""
  return None if None in values else personal.number(metric.worst(values))


def _over_clients(
    groups: Row, name: str, federation: Federation
) -> float | None:
  """The mean over clients of `<name>/<group>`; None if one is None."""
  values = [groups[f'{name}/{group.name}'] for group in federation.groups]
  if None in values:
    return None
  return (
      sum(
          group.num_clients * value
          for group, value in zip(federation.groups, values, strict=True)
      )
      / federation.num_clients
  )
