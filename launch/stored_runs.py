"""Networks of stored runs, for the programs that analyse them."""

from collections.abc import Iterator, Sequence
import logging
from typing import Any, NamedTuple

from absl import flags

from . import config_flag, python_files
from .terminal import expanded


class Network(NamedTuple):
  """The network of a group, or of a client that has its own.

  Attributes:
    label: Name of the group, with the client's id if it is a client's network.
    model: Its architecture, a `BlockModel`.
    variables: Its trained variables.
  """

  label: str
  model: Any
  variables: Any


def define_flags() -> None:
  """Defines flags for what the files of a run do not store."""
  flags.DEFINE_string('data_dir', None, "Folder of the run's data here.")
  flags.DEFINE_string('data_file', None, "File of the run's data here.")
  flags.DEFINE_string(
      'partition_file', None, "File of the run's partition here."
  )
  flags.DEFINE_string(
      'config', None,
      'Config file of the run, if it registers data sets, partitions, methods '
      'or models; variants do not matter.',
  )  # fmt: skip


def register() -> None:
  """Imports the file of --config, if given, so that it registers its parts.

  Raises:
    ValueError: If it is not a config file.
  """
  if (spec := flags.FLAGS.config) is not None:
    expanded(spec, '--config')
    path = config_flag.find(spec.partition(':')[0])
    python_files.load(str(path), 'get_config')


def define_flags_of_one() -> None:
  """Defines flags for a run and for which of its models are taken."""
  flags.DEFINE_string('workdir', None, 'Folder of the run.')
  flags.DEFINE_bool('best', False, 'The models of the best evaluation.')
  define_flags()


def open_one() -> Any:
  """The run that the flags name, as `load_run` returns it.

  Raises:
    FileNotFoundError: If it is not a workdir with an evaluated run.
    ValueError: If a file is damaged, or a path cannot be read.
  """
  from fedjax_het.experiment.load import load_run

  register()
  options = flags.FLAGS
  return load_run(
      expanded(options.workdir, '--workdir'),
      data_dir=options.data_dir,
      data_file=options.data_file,
      partition_file=options.partition_file,
      best=options.best,
  )


def hide_warnings_of_configs() -> None:
  """Hides what was shown during the runs; damaged files are still warned of."""
  logging.getLogger('fedjax_het.experiment.build').setLevel(logging.ERROR)


def open_runs(
    texts: Sequence[str],
    data_dir: str | None,
    data_file: str | None,
    partition_file: str | None = None,
    flag: str = '--workdir',
) -> list[Any]:
  """The runs of some workdirs, as `load_run` returns them.

  Warnings about their configs are hidden; they were shown during the runs.

  Args:
    texts: The workdirs, as the flag names them.
    data_dir: Folder of their data on this machine; None for the configs' own.
    data_file: File of their data, likewise.
    partition_file: File of their partition, likewise.
    flag: The flag, for messages.

  Returns:
    The runs.

  Raises:
    FileNotFoundError: If one is not a workdir with an evaluated run.
    ValueError: If a file is damaged, or a path cannot be read.
  """
  from fedjax_het.experiment import load_run

  hide_warnings_of_configs()
  return [
      load_run(
          expanded(text, flag),
          data_dir=data_dir,
          data_file=data_file,
          partition_file=partition_file,
      )
      for text in texts
  ]


def names_of(runs) -> list[str]:
  """Names of runs, for legends and tables."""
  from fedjax_het.reporting.run_files import short_names

  return short_names([run.workdir for run in runs])


def networks(run, most: int) -> list[Network]:
  """The networks of a run that can be compared.

  Args:
    run: The run.
    most: Largest number of networks: of groups or, if clients have their own
      models, of clients taken from each group in turn.

  Returns:
    The networks, in the order of the groups.

  Raises:
    ValueError: If the run does not evaluate one network per group or client;
      or as `Run.model`.
    FileNotFoundError: If data or checkpoints are missing.
  """
  experiment = run.experiment
  algorithm, groups = experiment.algorithm, experiment.federation.groups
  if algorithm.one_model:
    raise ValueError(
        f'{run.workdir}: {run.config.algorithm.name} evaluates one model for '
        'all groups; there is nothing to compare.'
    )
  if not algorithm.personal:
    return [
        Network(one.name, one.model, network_of(
            run.model(one.name).variables, one.model, run.config.algorithm.name
        ))
        for one in groups[:most]
    ]  # fmt: skip
  chosen = sorted(_in_turn(groups, most))
  return [
      Network(
          f'{groups[i].name}, client {client}',
          groups[i].model,
          network_of(
              run.model(client=client).variables,
              groups[i].model,
              run.config.algorithm.name,
          ),
      )
      for i, client in chosen
  ]


def _in_turn(groups, most: int) -> list[tuple[int, int]]:
  """(group, client) of the groups' first clients, then their second, ..."""

  def found() -> Iterator[tuple[int, int]]:
    for row in range(max(group.num_clients for group in groups)):
      for i, group in enumerate(groups):
        if row < group.num_clients:
          yield i, int(group.client_ids[row])

  return [pair for _, pair in zip(range(most), found(), strict=False)]


def network_of(evaluated: Any, model, method: str) -> Any:
  """Finds the variables of a group's network in a method's evaluated model.

  Args:
    evaluated: Result of `client_model`: variables, or a tuple of them.
    model: The group's architecture.
    method: The method, for the message.

  Returns:
    The first variables that fit the architecture.

  Raises:
    ValueError: If none fit, such as parts of a wider network.
  """
  import jax
  import numpy as np

  def shapes(params):
    return jax.tree.map(np.shape, params)

  found = [evaluated] if hasattr(evaluated, 'params') else [*evaluated]
  want = shapes(model.abstract_variables.params)
  for one in found:
    if hasattr(one, 'params') and shapes(one.params) == want:
      return one
  raise ValueError(
      f"{method} does not evaluate its groups' own networks, but parts of "
      'them or several together; their layers cannot be compared.'
  )
