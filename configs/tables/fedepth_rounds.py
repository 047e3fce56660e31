"""Which methods need more rounds than training of the whole model."""

from fedjax_het.configs.tables import fedepth_middle, fedepth_table2

from fedjax_het.reporting.results_table import Table

ROWS = ('FedAvg x1', 'FeDepth', 'HeteroFL masked', 'SplitMix masked')
COLUMN = 'cifar10 alpha 0.3'
ROUNDS = (100, 200)


def _cell(label, rounds):
  middle = fedepth_middle.get_table()
  config = middle.rows[label][COLUMN].copy_and_resolve_references()
  config.num_rounds = rounds  # The cosine schedule ends with the last round.
  return config


def get_table() -> Table:
  """Four rows of Table 2, by the number of rounds.

  Run: `python -m launch.sweep --table=fedepth_rounds
  --reuse=results/fedepth_middle --data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its 500 rounds of ten epochs.
  """
  columns = {f'{rounds} rounds': rounds for rounds in ROUNDS}
  return Table(
      title='FeDepth, Table 2, by the number of rounds',
      setting=(
          f'{fedepth_table2.SETTING} {fedepth_table2.BUDGETS} CIFAR-10, '
          'Dirichlet 0.3. Here two epochs a round, and the rate falls to the '
          'last round of each column.'
      ),
      rows={
          label: {name: _cell(label, n) for name, n in columns.items()}
          for label in ROWS
      },
      paper={
          label: dict.fromkeys(columns, fedepth_table2.target(label, COLUMN))
          for label in ROWS
      },
      seeds=(0,),
      mean='clients',
      columns=tuple(columns),
  )
