"""FedHe's comparison on CIFAR-10, narrowed and shortened for two CPU cores."""

from fedjax_het.configs.tables import fedhe_mnist

from fedjax_het.reporting.results_table import Table


def get_table() -> Table:
  """As `fedhe_mnist.py`.

  Run: `python -m launch.sweep --table=configs/tables/fedhe_cifar10.py
  --data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its sections V-C to V-E.
  """
  return Table(
      title='FedHe and its baselines on CIFAR-10',
      setting=fedhe_mnist.SETTING,
      rows=fedhe_mnist.rows('cifar10'),
      paper=fedhe_mnist.paper('cifar10'),
      seeds=(0, 1, 2),
      mean='clients',
      families=fedhe_mnist.FAMILIES,
      bars=fedhe_mnist.BARS,
  )
