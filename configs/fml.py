"""FML: a private model and a small shared one on each client."""

from fedjax_het.configs import common


def _paper(config):
  """The paper's local training: SGD at 0.01, momentum 0.9, batches of 128."""
  config.local.optimizer = 'sgd'
  config.local.learning_rate = 0.01
  config.local.momentum = 0.9
  config.local.weight_decay = 5e-4
  config.local.batch_size = 128
  config.local.epochs = 5


VARIANTS = dict(paper=_paper)


def get_config(arg=''):
  """FML on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/fml.py[:variant,...]`.

  The meme is the smallest of the three nets, `mini_resnet6`;
  `--config.server_model=MODEL` chooses another.

  Measured without variants, seed 0, one thread: mean client accuracy
  62.8 % after 20 rounds, 96.1 % for the meme (view `meme`).

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('fml', arg, VARIANTS)
