"""FeDepth's comparison at the two learning rates of the paper and its code."""

from fedjax_het.configs.tables import _papers, fedepth_table2

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
ROWS = (
    'FedAvg x1', 'FedAvg x1/6', 'HeteroFL', 'SplitMix', 'FeDepth', 'm-FeDepth',
)  # fmt: skip
COLUMN = 'cifar10 alpha 0.3'
# The paper prints 0.1; the authors' scripts have 0.01.
RATES = (0.1, 0.01)
COLUMNS = {f'rate {rate:g}': rate for rate in RATES}


def get_table(scale: str = SCALES[0]) -> Table:
  """The methods of Table 2 by two learning rates.

  Run: `python -m launch.sweep --table=fedepth_rates --scale=cpu
  --data_dir=DIR`; with `--reuse=results/fedepth_table2/cpu` the cells at 0.1
  are copied.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table, of CIFAR-10 with Dirichlet 0.3.
  """
  configs = fedepth_table2.of_column(ROWS, COLUMN, scale)
  full = fedepth_table2.UNMASKED.replace('from 0.1', 'from the rate named')
  return Table(
      title='FeDepth: two learning rates for each method',
      setting=_papers.in_words(
          scale,
          f'CIFAR-10, balanced Dirichlet 0.3. {full} {fedepth_table2.BUDGETS}',
          fedepth_table2.CPU,
      ),
      rows={
          label: {
              name: _papers.with_rate(config, rate)
              for name, rate in COLUMNS.items()
          }
          for label, config in configs.items()
      },
      paper={},
      seeds=(0,),
      columns=tuple(COLUMNS),
      mean='clients',
  )
