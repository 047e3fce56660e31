"""SlimFL: all widths up to a client's own, trained together in every step."""

from fedjax_het.configs.widths import (
  RATES_OF_BLOCKS,
  blocks,
  fixed_rates,
  widths_config,
)

from fedjax_het.configs import common


def _paper(config):
  """Every client holds both widths of the paper."""
  blocks(config, 'rate', dict(full='1'))
  config.algorithm.widths = ('1', '1/2')


VARIANTS = dict(
    **RATES_OF_BLOCKS,
    # The paper's widths, on all clients.
    paper=_paper,
    # Probabilities of ours: 0.8 for the thin part, 0.4 for both.
    erasures=common.set_options(p_thin=0.8, p_rest=0.5),
    # As in slimmable networks: every width learns from labels alone.
    wo_distillation=common.set_options(distill_weight=0.0),
)


def get_config(arg=''):
  """SlimFL on the embedded digits: five widths of one ResNet, 10 clients.

  Run: `python -m launch.train --config=configs/slimfl.py[:variant,...]`, such
  as `--config=configs/slimfl.py:paper,erasures`. Clients, widths and models are
  those of `fedrolex.py` and `fjord.py`.

  Measured without variants, seed 0, one thread: accuracy of the full width
  80.3 % after 20 rounds, 64.1 MB up and 64.1 MB down.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('slimfl', arg, VARIANTS, fixed_rates)
