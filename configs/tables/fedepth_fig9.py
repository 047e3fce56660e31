"""FeDepth's Fig. 9: ViT-T/16 trained part by part, compared with FedAvg."""

from fedjax_het.configs.tables import _papers, fedepth_table2

from fedjax_het.configs import fedavg, fedepth
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
METHODS = {
    'FedAvg x1': (fedavg.get_config, 'vit'),
    'FedAvg x1/6': (fedavg.get_config, 'vit_sixth'),
    'FeDepth': (fedepth.get_config, 'vit'),
    'm-FeDepth': (fedepth.get_config, 'vit,own_heads'),
}


def _small(config):
  """Images of original size in 64 patches, few rounds, from scratch."""
  config.image_size = None
  config.model.patch = 4
  config.num_rounds, config.eval_every, config.checkpoint_every = 20, 5, 1
  config.local.epochs, config.local.batch_size = 1, 32
  config.local.optimizer, config.local.learning_rate = 'adam', 1e-3
  config.local.momentum, config.local.weight_decay = 0.0, 0.0
  config.validation = None


def _digits(config):
  config.image_size = None


def get_table(scale: str = SCALES[0]) -> Table:
  """The bars of the figure, trained from scratch.

  Run: `python -m launch.sweep --table=fedepth_fig9 --data_dir=DIR`. The library
  includes no pretrained parameters; `configs/fedepth.py` describes fine-tuning
  from a checkpoint.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table; the paper draws bars and prints no numbers.
  """
  columns = fedepth_table2.COLUMNS
  rows = {}
  for label, row in fedepth_table2.cells(
      METHODS, columns, 'quick' if scale == 'quick' else 'full'
  ).items():
    for config in row.values():
      dict(full=lambda c: None, cpu=_small, quick=_digits)[scale](config)
    rows[label] = row
  full = (
      'ViT-T/16 without pretrained weights (the paper fine-tunes), 100 clients '
      'of 500 images, ten a round, 100 rounds; a quarter of the clients each '
      'hold 1/6, 1/3, 1/2 and all of the model. FedAvg trains the whole model '
      'everywhere, or one of 1/6 of the width. The section does not name '
      'optimiser, epochs, batch and augmentation: those of the case study, SGD '
      'with momentum, ten epochs (a stage), batch 128, crops and flips, a '
      'fifth of every client held out, but its own rate, 5e-4.'
  )
  cpu = (
      'Here images of 32 pixels in 64 patches, 20 rounds of one epoch at batch '
      '32, Adam 1e-3, and nothing is held out.'
  )
  return Table(
      title='FeDepth, Fig. 9: ViT-T/16 from scratch',
      setting=_papers.in_words(scale, full, cpu),
      rows=rows,
      paper={},
      seeds=(0,),
      mean='clients',
      columns=tuple(columns),
  )
