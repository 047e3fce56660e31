"""Writes the trained models of a run to flax or orbax files."""

from collections.abc import Mapping
import pathlib

import flax.serialization
import jax
import orbax.checkpoint as ocp

from fedjax_het.experiment.checkpoints import quiet
from fedjax_het.experiment.trained import Model
from fedjax_het.options import one_of

FORMATS = ('msgpack', 'orbax')


def export(
    models: Mapping[str | int, Model], folder: pathlib.Path, format: str
) -> list[pathlib.Path]:
  """Writes the variables of each model.

  Args:
    models: {group name or client id: model}.
    folder: The output folder, created if missing.
    format: 'msgpack' for one flax file per model, or 'orbax' for one checkpoint
      (a folder) per model. Both hold nested dicts of arrays.

  Returns:
    The paths written: `<group>.msgpack` or `client<id>.msgpack`, without suffix
    for orbax.

  Raises:
    ValueError: If the format is unknown.
    FileExistsError: If one of them is there already; then none is written.
    OSError: If it cannot be written.
  """
  one_of('format', format, FORMATS)
  suffix = '.msgpack' if format == 'msgpack' else ''
  paths = {key: folder / f'{_name(key)}{suffix}' for key in models}
  for path in paths.values():
    if path.exists():
      raise FileExistsError(f'{path} is there already; name another folder.')
  folder.mkdir(parents=True, exist_ok=True)
  for key, model in models.items():
    if format == 'msgpack':
      model.save(paths[key])
    else:
      _save_orbax(model, paths[key])
  return [*paths.values()]


def _name(key: str | int) -> str:
  return f'client{key}' if isinstance(key, int) else key


def _save_orbax(model: Model, path: pathlib.Path) -> None:
  """Writes an orbax checkpoint of nested dicts, like the msgpack files."""
  tree = flax.serialization.to_state_dict(jax.device_get(model.variables))
  with quiet(), ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path.absolute(), tree)
