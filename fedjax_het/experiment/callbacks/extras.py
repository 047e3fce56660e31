"""Loggers whose packages are extras of this library."""

import importlib.util
import os
from typing import Any

from fedjax_het.experiment.callbacks.base import Callback, Start, numbers
from fedjax_het.reporting.run_files import Row


def check_installed(package: str, extra: str) -> None:
  """Raises ValueError if the package of an extra is missing.

  Args:
    package: The name by which it is imported.
    extra: The extra of this library that installs it.
  """
  if importlib.util.find_spec(package) is None:
    raise ValueError(
        f'The logger {extra} needs the extra {extra}: '
        f"pip install 'fedjax_het[{extra}]'."
    )


class TensorBoard(Callback):
  """Writes event files to the workdir's `tensorboard` (extra `tensorboard`).

  The numbers of each line are scalars, `<split>/<name>` by round.
  """

  def __init__(self):
    """Raises ValueError if tensorboardX is not installed."""
    check_installed('tensorboardX', 'tensorboard')
    self._writer = None

  def on_start(self, run: Start) -> None:
    """Opens the folder; hides scalars of rounds that will be run again."""
    import tensorboardX

    done = run.rows[-1]['round'] if run.rows else -1
    self._writer = tensorboardX.SummaryWriter(
        str(run.workdir / 'tensorboard'), purge_step=done + 1
    )

  def on_row(self, row: Row) -> None:
    """Writes the numbers of one line."""
    for name, value in numbers(row).items():
      self._writer.add_scalar(f'{row["split"]}/{name}', value, row['round'])

  def close(self) -> None:
    """Flushes and closes the file."""
    if self._writer is not None:
      self._writer.close()


class WandB(Callback):
  """Logs to Weights & Biases, offline, in the workdir (extra `wandb`).

  Each start of the run writes a new offline run under `wandb`, which repeats
  the numbers of earlier starts. `wandb sync` uploads it.
  """

  def __init__(self, project: str = 'fedjax_het'):
    """Raises ValueError if wandb is not installed.

    Args:
      project: The project's name in Weights & Biases.
    """
    check_installed('wandb', 'wandb')
    self._project, self._run = project, None

  def on_start(self, run: Start) -> None:
    """Opens an offline run, and logs the lines so far."""
    import wandb

    self._run = wandb.init(
        mode='offline',
        dir=str(run.workdir),
        project=self._project,
        name=run.workdir.name,
        config=run.config.to_dict(),
        settings=wandb.Settings(silent=True),
    )
    for row in run.rows:
      self.on_row(row)

  def on_row(self, row: Row) -> None:
    """Logs the numbers of one line, `<split>/<name>` by round."""
    named = {f'{row["split"]}/{k}': v for k, v in numbers(row).items()}
    self._run.log(named, step=row['round'])

  def close(self) -> None:
    """Ends the offline run."""
    if self._run is not None:
      self._run.finish()


class MLflow(Callback):
  """Logs to MLflow's file store in the workdir's `mlflow` (extra `mlflow`).

  Each start of the run is a new MLflow run, which repeats the numbers of
  earlier starts. Dots replace the slashes of names, because the store would
  need a file `accuracy` and, for `accuracy/<group>`, a folder of this name.
  """

  def __init__(self, experiment: str = 'fedjax_het'):
    """Raises ValueError if mlflow is not installed.

    Args:
      experiment: The experiment's name in MLflow.
    """
    check_installed('mlflow', 'mlflow')
    self._experiment = experiment
    self._client, self._id, self._ended = None, None, False

  def on_start(self, run: Start) -> None:
    """Opens the store and a run, and logs the config and the lines so far."""
    from mlflow.tracking import MlflowClient

    # MLflow 3 refuses its file store otherwise.
    os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')
    folder = run.workdir.absolute() / 'mlflow'
    self._client = client = MlflowClient(folder.as_uri())
    found = client.get_experiment_by_name(self._experiment)
    where = (
        client.create_experiment(self._experiment)
        if found is None
        else found.experiment_id
    )
    self._id = client.create_run(where, run_name=run.workdir.name).info.run_id
    client.log_dict(self._id, run.config.to_dict(), 'config.json')
    for row in run.rows:
      self.on_row(row)

  def on_row(self, row: Row) -> None:
    """Logs the numbers of one line, `<split>.<name>` by round."""
    for name, value in numbers(row).items():
      key = f'{row["split"]}.{name}'.replace('/', '.')
      self._client.log_metric(self._id, key, value, step=row['round'])

  def on_end(self, result: Any) -> None:
    """Records that the run ended without an error."""
    del result
    self._ended = True

  def close(self) -> None:
    """Ends the MLflow run."""
    if self._id is not None:
      status = 'FINISHED' if self._ended else 'FAILED'
      self._client.set_terminated(self._id, status)
