"""FedIN v2's Table 1, each client also tested on its own classes."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMN = 'fashion_mnist non-IID'


def _on_own_classes(config):
  """Adds the test of each client on images in its own classes' proportions."""
  config = config.copy_and_resolve_references()
  config.personal_test = True
  return config


def get_table(scale: str = SCALES[0]) -> Table:
  """The methods of Table 1 on one column, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_personal --data_dir=DIR`, a
  part: `--rows=FedAvg,FedDPA,FedSelect,FedFomo --seeds=1`.

  The paper does not say on which images it tests personal models; this test is
  ours.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table, of Fashion-MNIST with Dirichlet 0.5.
  """
  rows = fedin_v2_table1.get_table(scale).rows
  full = f'Fashion-MNIST, Dirichlet 0.5. {fedin_v2_table1.SETTING}'
  return Table(
      title="FedIN v2: clients' own classes",
      setting=_papers.in_words(scale, full, fedin_v2_table1.CPU),
      rows={
          label: {COLUMN: _on_own_classes(configs[COLUMN])}
          for label, configs in rows.items()
      },
      paper={},
      seeds=(0, 1, 2),
      mean='groups',
      columns=(COLUMN,),
  )
