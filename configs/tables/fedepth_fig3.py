"""FeDepth's Fig. 3: SplitMix by the width of its bases, on CIFAR-10."""

from fedjax_het.configs.tables import fedepth_fig2

from fedjax_het.configs import splitmix
from fedjax_het.reporting.results_table import Table

BASES = (16, 8, 4, 2)


def _bases(number):
  """Half of the clients train one base, the others all of them."""
  config = fedepth_fig2.three_labels(
      splitmix.get_config('fedepth,cpu,beta')
  )
  splitmix.budgets(number, dict(thin=f'1/{number}', full='1'))(config)
  return config


def get_table() -> Table:
  """Bases of 1/16, 1/8, 1/4 and 1/2 of the width.

  Run: `python -m launch.sweep --table=configs/tables/fedepth_fig3.py
  --data_dir=DIR`.

  Returns:
    The table; the paper draws curves and prints no numbers.
  """
  return Table(
      title="FeDepth's Fig. 3: SplitMix by the width of its bases, CIFAR-10",
      setting=(
          f'{fedepth_fig2.SETTING} Half of the clients (the paper gives no '
          'shares) train one base, the others as many as make up the full '
          'width; the test takes the mean of the logits of all bases.'
      ),
      rows={f'bases of 1/{number}': _bases(number) for number in BASES},
      paper={},
      seeds=(0, 1, 2),
      mean='clients',
  )
