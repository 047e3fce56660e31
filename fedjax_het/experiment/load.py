"""Reads a run back: its config, its metrics and its trained models."""

from collections.abc import Mapping
import dataclasses
import functools
import os
import pathlib
import time
from typing import Any

import ml_collections
import numpy as np

from fedjax_het.engine.confusion import class_accuracy
from fedjax_het.experiment import facts as facts_lib
from fedjax_het.experiment import metrics
from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.export import FORMATS, export
from fedjax_het.experiment.programs import make_driver, make_test
from fedjax_het.experiment.stored_config import with_new_entries
from fedjax_het.experiment.trained import Model, Reader, Trained
from fedjax_het.files import check_local
from fedjax_het.names import check_name
from fedjax_het.options import one_of
from fedjax_het.reporting import shown
from fedjax_het.reporting.confusion_file import read_confusion
from fedjax_het.reporting.run_files import Row, fitting, read_run
from fedjax_het.reporting.summary import Summary, main_metric, summarise

# Entries that affect only speed and rounding; with these values any machine can
# read a run.
_ANY_MACHINE = dict(backend='auto', chunk=None, conv_backend='xla')
# Entries that an evaluation uses.
_OF_TESTS = ('personal_test', 'eval_batch_size', 'eval_clients_per_group')


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
  """A stored run, as `load_run` returns it.

  Attributes:
    workdir: Its folder.
    config: Its config.
    facts: The contents of facts.json.
    rows: The lines of metrics.jsonl.
    places: Entries of the config for the paths of its data on this machine.
    best: Whether the models are those of its best evaluation, not the last.
  """

  workdir: pathlib.Path
  config: ml_collections.ConfigDict
  facts: dict[str, Any]
  rows: list[Row]
  places: Mapping[str, Any]
  best: bool = False

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

    NaN for a class without test examples. Raises the errors of `confusion`.
    """
    return {g: class_accuracy(counts) for g, counts in self.confusion.items()}

  @functools.cached_property
  def _trained(self) -> Trained:
    return _restore(self)

  @property
  def experiment(self) -> Experiment:
    """The run's groups, method and data, rebuilt; raises errors as `model`."""
    return self._trained.experiment

  @property
  def rounds(self) -> int:
    """Rounds that the models of the checkpoint have been trained for."""
    return self._trained.rounds

  @property
  def groups(self) -> dict[str, list[int]]:
    """{group: ids of its clients}."""
    return self._trained.groups

  def model(
      self, group: str | None = None, *, client: int | None = None
  ) -> Model:
    """The trained model of a group or of a client, see `Trained.model`.

    The first call reads the data set and the checkpoint.

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
    return self._trained.model(group, client=client)

  def features(
      self, x: Any, group: str | None = None, *, client: int | None = None
  ) -> dict[str, np.ndarray]:
    """The outputs of all blocks of a model, see `Trained.features`.

    Args:
      x: [n, ...] examples as the data set holds them.
      group: Name of a group whose clients share one model.
      client: Id of a client, of any group; instead of `group`.

    Returns:
      {block: [n, d] float32}, averaged over pixels or tokens.

    Raises:
      ValueError: As `model`; or if the examples do not fit the model, or it is
        not one network.
      FileNotFoundError: As `model`.
    """
    return self._trained.features(x, group, client=client)

  def models(self) -> dict[str | int, Model]:
    """All trained models: of each client, or of groups that share theirs.

    Returns:
      {client id or group name: model}.

    Raises:
      ValueError: As `model`.
      FileNotFoundError: As `model`.
    """
    return self._trained.models()

  def evaluate(self, **entries: Any) -> Row:
    """Tests the models of the checkpoint again, and stores nothing.

    Args:
      **entries: Values that replace those of the config: `personal_test`,
        `eval_batch_size`, `eval_clients_per_group`. Of the batch size a result
        depends only where norms take the statistics of a test batch.

    Returns:
      A line as those of the split 'test' in metrics.jsonl, see
      docs/metrics.md; without the virtual time of a clock.

    Raises:
      ValueError: If an entry is unknown or its value wrong; or as `model`.
      FileNotFoundError: As `model`.
    """
    for name in entries:
      check_name('entry', name, dict.fromkeys(_OF_TESTS))
    trained = _restore(self, entries) if entries else self._trained
    start, experiment = time.perf_counter(), trained.experiment
    state = make_driver(experiment).place(trained.state)
    scores = make_test(experiment)(state)
    seconds = time.perf_counter() - start
    return metrics.test_row(
        trained.rounds, scores, experiment.federation, seconds
    )

  def export(
      self, folder: str | os.PathLike, *, format: str = 'msgpack'
  ) -> list[pathlib.Path]:
    """Writes each trained model to a file or a checkpoint.

    Args:
      folder: The output folder, created if missing.
      format: 'msgpack' (flax) or 'orbax'.

    Returns:
      The paths written: `<group>.msgpack`, or `client<id>.msgpack` for clients
      with models of their own; without suffix for orbax.

    Raises:
      ValueError: If the format is unknown or it is a cloud folder; or as
        `model`.
      FileExistsError: If one of them is there already; then none is written.
      FileNotFoundError: As `model`.
      OSError: If it cannot be written.
    """
    one_of('format', format, FORMATS)  # Before anything is read.
    check_local(folder, 'folder')
    return export(self.models(), pathlib.Path(folder), format)


def load_run(
    workdir: str | os.PathLike,
    *,
    data_dir: str | None = None,
    data_file: str | None = None,
    partition_file: str | None = None,
    best: bool = False,
) -> Run:
  """Reads a run from its workdir, without changing the workdir.

  Config and metrics are read now, data and models on first use. The run may
  still be in progress.

  Args:
    workdir: Its folder.
    data_dir: Folder of its data on this machine; None for the config's.
    data_file: The same for an .npz file.
    partition_file: The same for a partition file.
    best: Whether to read the models that a `BestCheckpoint` has kept instead
      of those of the last checkpoint.

  Returns:
    The run.

  Raises:
    FileNotFoundError: If the folder holds no evaluated run.
    ValueError: If a file is damaged, or the folder is a cloud folder.
  """
  check_local(workdir, 'workdir')
  folder = pathlib.Path(workdir)
  stored, facts, rows = read_run(folder)
  with fitting(folder):
    whole = with_new_entries(stored)
  config = ml_collections.ConfigDict(_with_tuples(whole))
  places = {
      'data_dir': data_dir,
      'data_file': data_file,
      'partition.file': partition_file,
  }
  given = {name: str(place) for name, place in places.items() if place}
  return Run(folder, config.lock(), facts, rows, given, best)


def _with_tuples(value: Any) -> Any:
  """A config from JSON, with lists converted back to tuples."""
  if isinstance(value, Mapping):
    return {name: _with_tuples(entry) for name, entry in value.items()}
  if isinstance(value, list):
    return tuple(map(_with_tuples, value))
  return value


def _restore(run: Run, entries: Mapping[str, Any] = {}) -> Trained:
  """Rebuilds the experiment, and restores its last or best checkpoint."""
  config = ml_collections.ConfigDict(run.config.to_dict())
  for name, value in {**_ANY_MACHINE, **run.places, **entries}.items():
    with config.ignore_type():
      config.update_from_flattened_dict({name: value})
  try:
    experiment = build(config)
  except ValueError as e:
    if not str(e).startswith('Unknown '):
      raise
    raise ValueError(
        f'{e} If the config file of {run.workdir} registers it, import that '
        'file first; commands do so with --config=FILE.'
    ) from e
  driver = make_driver(experiment)
  folder = run.workdir / ('best' if run.best else 'checkpoints')
  if not folder.is_dir():
    what = 'best checkpoint: its run had no BestCheckpoint'
    raise FileNotFoundError(
        f'{run.workdir} has no {what if run.best else "checkpoints"}.'
    )
  checkpoints = Checkpoints(folder, read_only=True)
  try:
    restored = checkpoints.restore(driver.shapes(), driver.on_host)
  finally:
    checkpoints.close()
  if restored is None:
    raise FileNotFoundError(f'{folder} holds no checkpoint.')
  if not facts_lib.is_of(restored.notes, facts_lib.fingerprint(experiment)):
    raise ValueError(
        'The data or their partition are not those of the run in '
        f'{run.workdir}; give their place by data_dir, data_file or '
        'partition_file.'
    )
  return Reader(experiment)(restored.step, restored.state)
