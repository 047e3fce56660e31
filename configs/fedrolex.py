"""FedRolex: clients train rolling windows of one model, of various widths."""

from fedjax_het.configs.widths import (
  RATES_OF_BLOCKS,
  fixed_rates,
  widths_config,
)


def _plain(config):
  """Only the mean over holders, without Scaler and masked loss."""
  config.algorithm.scaler = False
  config.algorithm.mask = 'none'


def _code(config):
  """Rolls, clips and evaluates as the authors' code does."""
  config.algorithm.direction = -1
  config.local.clip_norm = 1.0
  config.model.norm = 'batch_only'


VARIANTS = dict(
    **RATES_OF_BLOCKS,
    plain=_plain,
    code=_code,
)


def get_config(arg=''):
  """FedRolex on the embedded digits: five widths of one ResNet, 10 clients.

  Run: `python -m launch.train --config=configs/fedrolex.py[:variant,...]`,
  such as `--config=configs/fedrolex.py:v2,fair`. Clients, widths and models are
  those of `heterofl.py`, except with `v2`: each width has a fifth of the
  clients.

  Measured without variants, seed 0, one thread: accuracy of the full width
  83.4 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('fedrolex', arg, VARIANTS, fixed_rates)
