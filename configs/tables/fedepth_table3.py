"""FeDepth's Table 3: clients of unequal sizes."""

from fedjax_het.configs.tables import _papers, fedepth_table2

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMNS = {
    f'{dataset} alpha_u {value}': (dataset, 'alpha_u', value)
    for dataset in ('cifar10', 'cifar100')
    for value in (0.3, 1.0)
}
METHODS = {
    label: fedepth_table2.METHODS[label]
    for label in (
        'FedAvg x1/6', 'HeteroFL', 'HeteroFL masked', 'SplitMix',
        'SplitMix masked', 'FeDepth', 'm-FeDepth',
    )
}  # fmt: skip


def get_table(scale: str = SCALES[0]) -> Table:
  """All of the paper's rows and columns, width methods masked and not.

  Run: `python -m launch.sweep --table=fedepth_table3 --data_dir=DIR`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table; the paper has one run per cell.
  """
  full = fedepth_table2.SETTING.replace('of 500 images', 'of 500 on average')
  return Table(
      title='FeDepth, Table 3: unbalanced clients',
      setting=_papers.in_words(
          scale,
          f'{full} A quarter of the clients each hold 1/6, 1/3, 1/2 and all of '
          'the model. Each class is spread over the clients by Dirichlet of '
          'that alpha; nobody has fewer than 160 images, so that a batch is '
          'left to train on.',
          f'{fedepth_table2.CPU} Nobody has fewer than 50 images. '
          f'{fedepth_table2.SUBSET}',
      ),
      rows=fedepth_table2.cells(METHODS, COLUMNS, scale),
      paper=fedepth_table2.paper(METHODS, COLUMNS),
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
  )
