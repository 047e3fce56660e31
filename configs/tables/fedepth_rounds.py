"""FeDepth beside training of the whole model, by rounds, epochs and images."""

from fedjax_het.configs.tables import fedepth_middle, fedepth_table2

from fedjax_het.reporting.results_table import Table

ROWS = ('FedAvg x1', 'FeDepth', 'HeteroFL masked', 'SplitMix masked')
SPLIT = 'cifar10 alpha 0.3'
# Rounds, local epochs (of a stage), and augmentation. In the authors' program
# clients see the same images in all visits.
COLUMNS = {
    '100 rounds': (100, 2, 'crop_flip'),
    '200 rounds': (200, 2, 'crop_flip'),
    '200 rounds of plain images': (200, 2, 'none'),
    '30 rounds of ten epochs': (30, 10, 'crop_flip'),
}


def _cell(config, rounds, epochs, augment):
  config = config.copy_and_resolve_references()
  config.num_rounds = rounds  # The cosine schedule ends with the last round.
  config.local.epochs = epochs
  config.local.augment = augment
  return config


def get_table() -> Table:
  """Four rows of Table 2, by rounds, local epochs and augmentation.

  Run: `python -m launch.sweep --table=fedepth_rounds
  --reuse=results/fedepth_middle --data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its 500 rounds of ten epochs.
  """
  middle = fedepth_middle.get_table().rows
  return Table(
      title='FeDepth, Table 2, by rounds, local epochs and augmentation',
      setting=(
          f'{fedepth_table2.SETTING} {fedepth_table2.BUDGETS} CIFAR-10, '
          'Dirichlet 0.3. Here two epochs (a stage) where a column does '
          'not say ten, and the rate falls to the last round of each. "Plain '
          'images" are neither cropped nor flipped.'
      ),
      rows={
          label: {
              name: _cell(middle[label][SPLIT], *how)
              for name, how in COLUMNS.items()
          }
          for label in ROWS
      },
      paper={
          label: dict.fromkeys(COLUMNS, fedepth_table2.target(label, SPLIT))
          for label in ROWS
      },
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
  )
