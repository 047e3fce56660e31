"""FjORD: ordered dropout; clients train all widths up to their own."""

from fedjax_het.configs.widths import (
  RATES_OF_BLOCKS,
  blocks,
  fixed_rates,
  one_model,
  rates,
  widths_config,
)

from fedjax_het.configs import common

# "Uniform-5" of the paper.
FIFTHS = dict(p2='1/5', p4='2/5', p6='3/5', p8='4/5', p10='1')


def _half(config):
  """The paper's drop scale 0.5: 0.1, 0.1, 0.1, 0.1 and 0.6 of the clients."""
  *narrow, widest = FIFTHS

  def sizes(total):
    tenth = max(1, total // 10)
    return {**dict.fromkeys(narrow, tenth), widest: total - 4 * tenth}

  one_model(config, sizes, {k: dict(rate=v) for k, v in FIFTHS.items()})


def _code(config):
  """Widths and local training of the authors' code."""
  blocks(config, 'rate', FIFTHS)
  config.local.optimizer = 'sgd'
  config.local.learning_rate = 0.1
  config.local.momentum = 0.0
  config.local.weight_decay = 1e-4
  config.local.batch_size = 32
  config.local.epochs = 1


VARIANTS = dict(
    **RATES_OF_BLOCKS,
    # The paper's drop scale 1: a fifth of the clients for each width.
    fifths=rates(FIFTHS),
    half=_half,
    code=_code,
    wo_distillation=common.set_options(distill_weight=0.0),
)


def get_config(arg=''):
  """FjORD on the embedded digits: five widths of one ResNet, 10 clients.

  Run: `python -m launch.train --config=configs/fjord.py[:variant,...]`, such as
  `--config=configs/fjord.py:wo_distillation`. Clients, widths and models are
  those of `fedrolex.py`.

  Measured without variants, seed 0: accuracy of the full width 82.0 % after 20
  rounds, 64 MB up and 64 MB down; 77.7 % with `wo_distillation`.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('fjord', arg, VARIANTS, fixed_rates)
