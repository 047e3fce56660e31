"""Preview of a run without training: data, models, memory and traffic."""

import contextlib
import os
import pathlib

import numpy as np

from fedjax_het.engine import timelines
from fedjax_het.engine.mapping import resolve_backend
from fedjax_het.engine.visits import expected_bytes
from fedjax_het.experiment import callbacks, duration, facts, footprint, form
from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.programs import make_job
from fedjax_het.experiment.workdir import check_workdir
from fedjax_het.files import check_local
from fedjax_het.reporting import tables
from fedjax_het.reporting.setting import named

# Rounds whose virtual times are planned.
_PLANNED = 1000


def lines(config, workdir: str | os.PathLike | None = None) -> list[str]:
  """Describes the run of a config; one local step is compiled and timed.

  Args:
    config: The config.
    workdir: The run's folder, which is not changed; None for a new one.

  Returns:
    Lines of text; a table is one entry of several lines.

  Raises:
    ValueError: As `build`.
    FileNotFoundError: As `build`.
  """
  if workdir is not None:
    check_local(workdir, 'workdir')
  with contextlib.ExitStack() as stack:
    folder = None if workdir is None else pathlib.Path(workdir)
    if folder is not None and folder.is_dir():
      check_workdir(folder, config)
    choose = form.Chooser(config, folder, stack)
    return _lines(build(config, choose), choose, config.backend)


def _lines(
    experiment: Experiment, choose: form.Chooser, backend: str
) -> list[str]:
  # Raises if a logger is not installed.
  callbacks.from_config(experiment.config)
  algorithm, federation = experiment.algorithm, experiment.federation
  # {group: bytes (down, up) of a visit}.
  visits = {
      group.name: expected_bytes(
          algorithm, group, experiment.data, federation.sizes[group.client_ids]
      ).mean(axis=0)
      for group in federation.groups
  }
  return [
      *_data(experiment), '', tables.as_text(_groups(experiment, visits)), '',
      *_traffic(experiment, visits), *_memory(experiment), *_form(choose),
      *_time(experiment, backend), *_clock(experiment), 'Nothing was trained.',
  ]  # fmt: skip


def _data(experiment: Experiment) -> list[str]:
  data, config = experiment.dataset, experiment.config
  sizes = [len(part) for part in experiment.parts]
  found = [
      f'Data: {data.name}, {len(data.train_labels):,} training and '
      f'{len(data.test_labels):,} test examples of shape '
      f'{_shape(data.train_images.shape[1:])}, {data.num_classes} classes.',
      f'Partition: {named(config.partition.to_dict())}, {len(sizes)} '
      f'clients of {min(sizes):,} to {max(sizes):,} examples, median '
      f'{np.median(sizes):,.0f}.',
  ]
  if experiment.federation.num_public:
    found.append(f'Public set: {experiment.federation.num_public:,} examples.')
  if experiment.validation is not None:
    found.append(f'Held out: {len(experiment.validation):,} examples.')
  return found


def _shape(shape) -> str:
  return 'x'.join(map(str, shape))


def _groups(experiment: Experiment, visits) -> tables.Table:
  """A table of the groups: model, shapes, and bytes kept and sent."""
  table = [[
      'group', 'model', 'input', 'blocks', 'parameters', 'clients',
      'kept by a client', 'down a visit', 'up a visit',
  ]]  # fmt: skip
  measured = facts.measure(experiment)['groups']
  for group in experiment.federation.groups:
    down, up = visits[group.name]
    of_group = measured[group.name]
    table.append([
        group.name,
        group.model.name,
        _shape(group.model.input_shape),
        str(len(group.model.block_names)),
        f'{of_group["parameters"]:,}',
        f'{group.num_clients} ({_ranges(group.client_ids)})',
        tables.megabytes(of_group['client_bytes']),
        tables.megabytes(down),
        tables.megabytes(up),
    ])
  return table


def _ranges(ids) -> str:
  """Ascending ids in few words, such as '0-3, 7, 9 ...'."""
  found = []
  for i in map(int, ids):
    if found and i == found[-1][1] + 1:
      found[-1][1] = i
    else:
      found.append([i, i])
  texts = [str(a) if a == b else f'{a}-{b}' for a, b in found]
  return ', '.join(texts[:4]) + (' ...' if len(texts) > 4 else '')


def _traffic(experiment: Experiment, visits) -> list[str]:
  """Bytes sent in a round, mean over cohorts, and in the whole run."""
  federation, cohort = experiment.federation, experiment.cohort_size
  number = federation.num_clients
  down, up = (
      cohort / number * sum(
          group.num_clients * visits[group.name][way]
          for group in federation.groups
      )
      for way in (0, 1)
  )  # fmt: skip
  rounds = experiment.config.num_rounds
  parts = 'if all optional parts are sent'
  if experiment.algorithm.sent_shares is not None:
    parts = 'with the expected shares of optional parts'
  return [
      f'A round: {cohort} of {number} clients, about {tables.megabytes(down)} '
      f'down and {tables.megabytes(up)} up.',
      f'{rounds} rounds: about {tables.megabytes(rounds * down)} down and '
      f'{tables.megabytes(rounds * up)} up, {parts}.',
  ]


def _memory(experiment: Experiment) -> list[str]:
  """The lower bound of memory, and the memory available."""
  needs = footprint.lower_bound(experiment)
  parts = ', '.join(
      f'{entry} {tables.megabytes(size)}' for entry, size in needs.items()
  )
  available = footprint.available_bytes()
  there = '' if available is None else (
      f'; {tables.megabytes(available)} are available'
  )
  return [
      f'Memory: at least {tables.megabytes(sum(needs.values()))}, by the entry '
      f'that sets it: {parts}{there}.'
  ]


def _form(choose: form.Chooser) -> list[str]:
  """How a run on a CPU computes, see `form`; [] if nothing is chosen."""
  return [choose.line] if choose.line else []


def _time(experiment: Experiment, backend: str) -> list[str]:
  """The estimated time of local training, or why there is none.

  Args:
    experiment: The experiment.
    backend: The backend of the config before a form replaced it.
  """
  chosen = experiment.config.backend
  found = duration.estimate(experiment, backend)
  where = ' on one of the devices' if chosen != backend else ''
  if found is None:
    return [
        f'Time: not estimated for the backend {resolve_backend(backend)}, '
        'which trains several clients at once.'
    ]
  rounds, once = experiment.config.num_rounds, found.round_seconds
  return [
      f'Time: about {tables.duration(once)} of plain local training a round'
      f'{where}, {tables.duration(rounds * once)} in {rounds} rounds, by a '
      f'step of {found.group} ({1e3 * found.step_seconds:,.2g} ms) and the '
      'FLOPs of the others. Compilation, evaluation and what the method adds '
      'are not included.'
  ]


def _clock(experiment: Experiment) -> list[str]:
  """Virtual seconds of a visit, and of the run; [] without devices."""
  if experiment.devices is None:
    return []
  job, config = make_job(experiment), experiment.config
  fleet = timelines.make_fleet(job)
  visits = []
  for group in experiment.federation.groups:
    seconds = [sum(fleet.seconds(client)) for client in group.client_ids]
    low, high = map(tables.duration, (min(seconds), max(seconds)))
    visits.append(
        f'{low if low == high else f"{low} to {high}"} ({group.name})'
    )
  rounds = min(config.num_rounds, _PLANNED)
  end = timelines.timeline_of(job, config.clock.mode)(rounds)['virtual_time']
  first = 'the first ' if rounds < config.num_rounds else ''
  return [
      f'Clock: a visit takes {", ".join(visits)}, without jitter and pauses; '
      f'{first}{rounds:,} rounds take {tables.virtual(end)}.'
  ]
