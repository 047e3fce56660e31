"""Reads a run back: its config, its metrics and its trained models."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import os
import pathlib
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedjax_het.engine.confusion import class_accuracy
from fedjax_het.engine.types import Group
from fedjax_het.engine.visits import check_inputs
from fedjax_het.experiment import facts as facts_lib
from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.programs import make_driver
from fedjax_het.experiment.stored_config import with_new_entries
from fedjax_het.files import write_atomically
from fedjax_het.names import check_name
from fedjax_het.options import at_least
from fedjax_het.reporting import shown
from fedjax_het.reporting.confusion_file import read_confusion
from fedjax_het.reporting.run_files import Row, read_run
from fedjax_het.reporting.summary import Summary, main_metric, summarise

# Entries that say how a run computes, not what: any machine can read it.
_ANY_MACHINE = dict(
    backend='auto', chunk=None, conv_backend='xla', tensorboard=False
)


class Model(NamedTuple):
  """A trained model.

  Attributes:
    apply: `(variables, x) -> outputs [B, C]`, compiled. `x` are examples as the
      data set holds them, such as [B, H, W, C] uint8 images; what the run did
      to them before its models is part of it.
    variables: Its parameters and running statistics, a pytree.
  """

  apply: Callable[[Any, Any], jax.Array]
  variables: Any

  def __repr__(self) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(self.variables))
    return f'Model(apply, variables of {count:,} numbers)'

  def save(self, path: str | os.PathLike) -> None:
    """Writes the variables in flax's msgpack format.

    `flax.serialization.msgpack_restore(data)` reads them as nested dicts, and
    `flax.serialization.from_bytes(variables, data)` in the form that they have
    here.

    Args:
      path: The file.

    Raises:
      OSError: If it cannot be written.
    """
    data = flax.serialization.to_bytes(jax.device_get(self.variables))
    write_atomically(pathlib.Path(path), data)


class _Trained(NamedTuple):
  """Contents of a checkpoint, for evaluation, and {group: `Model.apply`}."""

  experiment: Experiment
  rounds: int
  server: Any
  clients: dict[str, Any]
  apply: dict[str, Callable[[Any, Any], jax.Array]]


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
  """A run that was read back, as `load_run` gives it.

  Attributes:
    workdir: Its folder.
    config: Its config.
    facts: The contents of facts.json.
    rows: The lines of metrics.jsonl.
    places: Entries of the config with the paths of its data here.
  """

  workdir: pathlib.Path
  config: ml_collections.ConfigDict
  facts: dict[str, Any]
  rows: list[Row]
  places: Mapping[str, Any]

  @property
  def summary(self) -> Summary:
    """A summary of the rows."""
    return summarise(
        self.rows, self.config.target_accuracy, main_metric(self.facts)
    )

  @property
  def _title(self) -> str:
    return (
        f'{self.workdir}: {self.config.algorithm.name} on '
        f'{self.config.dataset}, {self.summary.rounds} of '
        f'{self.config.num_rounds} rounds'
    )

  def __repr__(self) -> str:
    return shown.as_text(self._title, self.summary, self.facts)

  def _repr_html_(self) -> str:
    return shown.as_html(self._title, self.summary, self.facts)

  def metrics(self, split: str = 'test') -> dict[str, list[Any]]:
    """The numbers of all rounds by name, as for `pandas.DataFrame`.

    Args:
      split: 'test', 'train', 'validation' or 'warm_up'.

    Returns:
      {name: one number per line}, see `shown.columns`.

    Raises:
      ValueError: If the run has no such lines.
    """
    check_name('split', split, dict.fromkeys(row['split'] for row in self.rows))
    return shown.columns(self.rows, split)

  @functools.cached_property
  def confusion(self) -> dict[str, np.ndarray]:
    """Confusion matrices of the last evaluation on the whole test set.

    {group: [E, C, C] int32}, one matrix for each of the E evaluated models of
    the group (see `models/<group>` in docs/metrics.md): counts of examples by
    true class (rows) and predicted class (columns).

    Raises:
      FileNotFoundError: If the run has none.
      ValueError: If the file is damaged.
    """
    found = read_confusion(self.workdir)
    if found is None:
      raise FileNotFoundError(
          f'{self.workdir} holds no confusion matrices: its task has no '
          'classes, or it was run by an older version.'
      )
    return found.counts

  @property
  def class_accuracy(self) -> dict[str, np.ndarray]:
    """{group: [E, C] float64}, accuracy of each evaluated model by class.

    NaN for a class without test examples; errors are those of `confusion`.
    """
    return {g: class_accuracy(counts) for g, counts in self.confusion.items()}

  @functools.cached_property
  def _trained(self) -> _Trained:
    return _restore(self)

  @property
  def rounds(self) -> int:
    """Rounds that the models have been trained for: those of a checkpoint."""
    return self._trained.rounds

  @property
  def groups(self) -> dict[str, list[int]]:
    """{group: ids of its clients}."""
    return {
        group.name: group.client_ids.tolist()
        for group in self._trained.experiment.federation.groups
    }

  def model(
      self, group: str | None = None, *, client: int | None = None
  ) -> Model:
    """The trained model of a group or of a client.

    The first call reads the data set and the last checkpoint.

    Args:
      group: Name of a group whose clients share one model.
      client: Id of a client, of any group; instead of `group`.

    Returns:
      The model, which unpacks as `apply, variables`.

    Raises:
      ValueError: If neither or both are given, one is unknown, or the group's
        clients have models of their own; or if the checkpoints cannot be read.
      FileNotFoundError: If data or checkpoints are missing.
    """
    experiment = self._trained.experiment
    federation, algorithm = experiment.federation, experiment.algorithm
    if (group is None) == (client is None):
      raise ValueError('Name either a group or a client, as model(client=0).')
    if client is None:
      found = {one.name: one for one in federation.groups}
      check_name('group', group, found)
      chosen, row = found[group], 0
      if algorithm.personal:
        raise ValueError(
            f'The clients of group {group!r} have models of their own; name '
            f'one of the clients {chosen.client_ids.tolist()!r:.80}.'
        )
    else:
      at_least(0, client=client)
      if client >= federation.num_clients:
        raise ValueError(
            f'client must be one of 0..{federation.num_clients - 1}, got '
            f'{client}.'
        )
      group_of, row_of = federation.places()
      chosen = federation.groups[group_of[client]]
      row = int(row_of[client])
    return _model(self._trained, chosen, row)

  def models(self) -> dict[str | int, Model]:
    """All trained models: of each client, or of groups that share theirs.

    Returns:
      {client id or group name: model}.

    Raises:
      ValueError: As `model`.
      FileNotFoundError: As `model`.
    """
    experiment = self._trained.experiment
    groups = experiment.federation.groups
    if not experiment.algorithm.personal:
      return {group.name: self.model(group.name) for group in groups}
    ids = range(experiment.federation.num_clients)
    return {client: self.model(client=client) for client in ids}


def load_run(
    workdir: str | os.PathLike,
    *,
    data_dir: str | None = None,
    data_file: str | None = None,
) -> Run:
  """Reads a run back from its workdir, in which nothing is changed.

  Config and metrics are read at once; data and models when they are asked for.
  The run may still be going on.

  Args:
    workdir: Its folder.
    data_dir: Folder of its data on this machine; None for the config's.
    data_file: The same for an .npz file.

  Returns:
    The run.

  Raises:
    FileNotFoundError: If it is no workdir with an evaluated run.
    ValueError: If a file is damaged.
  """
  folder = pathlib.Path(workdir)
  stored, facts, rows = read_run(folder)
  config = ml_collections.ConfigDict(_with_tuples(with_new_entries(stored)))
  places = dict(data_dir=data_dir, data_file=data_file)
  given = {name: str(place) for name, place in places.items() if place}
  return Run(folder, config.lock(), facts, rows, given)


def _with_tuples(value: Any) -> Any:
  """A config of JSON with the tuples that JSON has made lists."""
  if isinstance(value, Mapping):
    return {name: _with_tuples(entry) for name, entry in value.items()}
  if isinstance(value, list):
    return tuple(map(_with_tuples, value))
  return value


def _restore(run: Run) -> _Trained:
  """Builds the experiment anew, and fills it from the last checkpoint."""
  config = ml_collections.ConfigDict(run.config.to_dict())
  for name, value in {**_ANY_MACHINE, **run.places}.items():
    with config.ignore_type():
      config[name] = value
  experiment = build(config)
  driver = make_driver(experiment)
  folder = run.workdir / 'checkpoints'
  if not folder.is_dir():
    raise FileNotFoundError(f'{run.workdir} has no checkpoints.')
  checkpoints = Checkpoints(folder, read_only=True)
  try:
    restored = checkpoints.restore(driver.shapes(), driver.on_host)
  finally:
    checkpoints.close()
  if restored is None:
    raise FileNotFoundError(f'{folder} holds no checkpoint.')
  if restored.notes['data'] != facts_lib.fingerprint(experiment):
    raise ValueError(
        'The data or their partition are not those of the run in '
        f'{run.workdir}; give their place by data_dir or data_file.'
    )
  state, server = restored.state, restored.state.server
  if experiment.algorithm.calibrate is not None:
    server = jax.jit(experiment.algorithm.calibrate)(server, experiment.data)
  apply = {
      group.name: _apply(experiment, group)
      for group in experiment.federation.groups
  }
  return _Trained(experiment, restored.step, server, state.clients, apply)


def _model(trained: _Trained, group: Group, row: int) -> Model:
  """The model of one client; `row` is its place in the group."""
  algorithm = trained.experiment.algorithm
  client = jax.tree.map(
      lambda leaf: jnp.asarray(leaf[row]), trained.clients[group.name]
  )
  return Model(
      trained.apply[group.name],
      algorithm.client_model(trained.server, client, group),
  )


def _apply(experiment: Experiment, group: Group):
  """Builds `Model.apply` of a group."""
  preprocess = experiment.preprocess
  predict = jax.jit(
      lambda variables, x: experiment.algorithm.predict(
          group, variables, preprocess(x)
      )
  )

  def apply(variables, x):
    x = jnp.asarray(x)
    check_inputs(group, preprocess, x)
    return predict(variables, x)

  return apply
