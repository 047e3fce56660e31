"""A small search of the learning rate for each method of FedIN v2's Table 1."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
RATES = (3e-4, 1e-3, 3e-3)
COLUMNS = {f'rate {rate:g}': rate for rate in RATES}


def get_table(scale: str = SCALES[0]) -> Table:
  """The methods of Table 1 by three learning rates, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_rates --data_dir=DIR`; with
  `--reuse=results/fedin_v2_table1` the cells at the paper's rate, 1e-3, are
  copied.

  The paper has one rate for all methods. The two others are ours; nothing else
  changes. The last round on the test set is shown for each rate, so that the
  best of three is optimistic.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table, of Fashion-MNIST with Dirichlet 0.5.
  """
  rows = fedin_v2_table1.get_table(scale).rows
  full = fedin_v2_table1.SETTING.replace('Adam 1e-3', 'Adam at the rate named')
  return Table(
      title='FedIN v2: three learning rates for each method',
      setting=_papers.in_words(
          scale, f'Fashion-MNIST, Dirichlet 0.5. {full}', fedin_v2_table1.CPU
      ),
      rows={
          label: {
              column: _papers.with_rate(configs['fashion_mnist non-IID'], rate)
              for column, rate in COLUMNS.items()
          }
          for label, configs in rows.items()
      },
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
      axis=('Learning rate', COLUMNS),
  )
