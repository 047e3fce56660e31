"""Callbacks: early stopping, the best checkpoint, a profiler trace, loggers."""

from fedjax_het.experiment.callbacks.base import (
  Callback,
  CallbackError,
  Callbacks,
  Start,
)
from fedjax_het.experiment.callbacks.extras import MLflow, TensorBoard, WandB
from fedjax_het.experiment.callbacks.files import CSV, CustomMetrics, Profile
from fedjax_het.experiment.callbacks.watching import (
  BestCheckpoint,
  EarlyStopping,
)

__all__ = [
    'CSV',
    'BestCheckpoint',
    'Callback',
    'CallbackError',
    'Callbacks',
    'CustomMetrics',
    'EarlyStopping',
    'MLflow',
    'Profile',
    'Start',
    'TensorBoard',
    'WandB',
    'from_config',
]


def from_config(config) -> list[Callback]:
  """The callbacks that a config asks for.

  Args:
    config: The config.

  Returns:
    The callbacks, in the order in which they are called.

  Raises:
    ValueError: If the package of a logger is missing.
  """
  section, found = config.callbacks, []
  if config.tensorboard:
    found.append(TensorBoard())
  for name, logger in (('csv', CSV), ('wandb', WandB), ('mlflow', MLflow)):
    if section[name]:
      found.append(logger())
  if section.profile:
    found.append(Profile(*section.profile))
  if section.best_checkpoint:
    found.append(BestCheckpoint(section.metric, section.mode))
  if section.patience is not None:
    found.append(
        EarlyStopping(section.patience, section.metric, section.mode)
    )
  return found
