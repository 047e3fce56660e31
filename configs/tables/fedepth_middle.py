"""FeDepth's Table 2 at a middle scale: full width, a hundred rounds."""

from fedjax_het.configs.tables import fedepth_table2

from fedjax_het.reporting.results_table import Table

# All of CIFAR-10's columns, and one of CIFAR-100's four.
COLUMNS = {
    name: column
    for name, column in fedepth_table2.COLUMNS.items()
    if column[0] == 'cifar10' or name == 'cifar100 alpha 0.3'
}


def _shorter(config):
  config.num_rounds = 100
  config.local.epochs = 2
  config.eval_every = config.checkpoint_every = 5
  return fedepth_table2.small_cifar100(config)


def get_table() -> Table:
  """All rows of Table 2, one seed.

  Run: `python -m launch.sweep --table=fedepth_middle --data_dir=DIR`, a part:
  `--rows=FeDepth,HeteroFL --cols=cifar10_alpha_0_3 --seeds=3`.

  Returns:
    The table; the paper's numbers are those of its Table 2.
  """
  rows = fedepth_table2.cells(fedepth_table2.METHODS, COLUMNS, 'full')
  return Table(
      title='FeDepth, Table 2, 100 rounds of two epochs',
      setting=(
          f'{fedepth_table2.SETTING} {fedepth_table2.BUDGETS} '
          f'{fedepth_table2.OWN} Here 100 rounds of two epochs (a stage). Of '
          f'CIFAR-100 one column of four. {fedepth_table2.SUBSET}'
      ),
      rows={
          label: {name: _shorter(config) for name, config in row.items()}
          for label, row in rows.items()
      },
      paper=fedepth_table2.paper(fedepth_table2.METHODS, COLUMNS),
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
      notes=fedepth_table2.NOTES,
  )
