"""FeDepth's Fig. 2: HeteroFL without one of its widths, on CIFAR-10."""

from fedjax_het.configs import heterofl
from fedjax_het.reporting.results_table import Table

LEFT_OUT = {
    'all widths': (),
    'without 1/8': ('eighth',),
    'without 1/4': ('quarter',),
    'without 1/2': ('half',),
    'without 1': ('full',),
    '1 alone': ('eighth', 'quarter', 'half'),
}
# The setting that Fig. 2 and Fig. 3 share.
SETTING = (
    'PreResNet-20, 100 clients of 500 images and three labels each (two where '
    'a client draws one of them twice), ten a round, SGD with momentum 0.9 '
    'and a cosine schedule from 0.1, crops and flips, the loss masked by the '
    'labels of the minibatch, batch statistics in the test, too. 20 rounds of '
    'one epoch at batch 32. Of the net, the rounds and the local training the '
    'case study says nothing; the rest of the paper has 500 rounds of ten '
    'epochs at batch 128.'
)


def three_labels(config):
  """Assigns three labels to each client, as the case studies do."""
  config.partition.labels_per_client = 3
  return config


def _without(widths):
  config = three_labels(
      heterofl.get_config('fedepth,cpu,beta,eighths,batch_mask')
  )
  config.algorithm.left_out = widths
  return config


def get_table() -> Table:
  """All widths, each of them left out in turn, and the full width alone.

  The paper leaves out a width's uploads, not its clients: they are sampled and
  train, but the server does not aggregate their uploads. All rows therefore
  have the same clients, data and cohorts, but a row without a width learns from
  fewer of them.

  Run: `python -m launch.sweep --table=configs/tables/fedepth_fig2.py
  --data_dir=DIR`.

  Returns:
    The table; the paper draws curves and prints no numbers.
  """
  return Table(
      title="FeDepth's Fig. 2: HeteroFL without one of its widths, CIFAR-10",
      setting=(
          f'{SETTING} A quarter of the clients each train 1/8, 1/4, 1/2 and '
          'all of the width. A width that is left out is not aggregated; its '
          'clients take part as ever.'
      ),
      rows={name: _without(widths) for name, widths in LEFT_OUT.items()},
      paper={},
      seeds=(0, 1, 2),
      mean='clients',
  )
