"""TensorBoard event files (needs the extra `tensorboard`)."""

import importlib.util
import pathlib
from typing import Any


def check_installed() -> None:
  """Raises ValueError if the package that writes event files is missing."""
  if importlib.util.find_spec('tensorboardX') is None:
    raise ValueError(
        'tensorboard=True needs the extra tensorboard: '
        "pip install 'fedjax_het[tensorboard]'."
    )


class Board:
  """Writes the lines of metrics.jsonl as scalars, `<split>/<name>` by round."""

  def __init__(self, folder: pathlib.Path, first_round: int = 0):
    """Opens a folder of event files.

    Args:
      folder: The folder.
      first_round: Scalars of this and later rounds, left by a run that was
        interrupted, are hidden.
    """
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(
        str(folder), purge_step=first_round
    )

  def write(self, row: dict[str, Any]) -> None:
    """Writes the numbers of one line."""
    server = {f'server/{k}': v for k, v in row.get('server', {}).items()}
    for name, value in {**row, **server}.items():
      if name != 'round' and isinstance(value, int | float):
        self._writer.add_scalar(f'{row["split"]}/{name}', value, row['round'])

  def close(self) -> None:
    """Flushes and closes the file."""
    self._writer.close()
