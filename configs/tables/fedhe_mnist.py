"""FedHe's comparison on MNIST, narrowed and shortened for two CPU cores."""

from configs import fd, fedavg, fedhe, fedmd, private
from fedjax_het.experiment import paper_targets
from fedjax_het.experiment.sweep_table import Table

METHODS = dict(
    FedHe=fedhe.get_config,
    FedMD=fedmd.get_config,
    FD=fd.get_config,
    Private=private.get_config,
)
FAMILIES = {
    'clients 0-4, two convolutions': [f'fedhe_cnn{i}' for i in range(5)],
    'clients 5-9, three convolutions': [f'fedhe_cnn{i}' for i in range(5, 10)],
}
SETTING = (
    'Ten clients with a tenth of the training set each, three minibatches of '
    '50 a visit, Adam 1e-3. Heterogeneous: the ten CNNs of the paper, one '
    'client each; homogeneous: model 9 everywhere (four of the personal models '
    'are evaluated); Dirichlet 0.5: the heterogeneous clients under label '
    'skew, which the paper leaves out. Widths an eighth and 60 rounds, a '
    'client sees 9,000 images, where the paper has full width and 5,000 '
    'visits of 150 images. FedMD sets a tenth of the training set aside as '
    'public, trains one epoch on it and one on the private data before round '
    '1 (the others do not), and digests 150 public examples a round.'
)


def rows(dataset: str):
  """The rows of a data set, heterogeneous ones first."""
  arg = f'fedhe,{dataset},cpu'
  configs = {name: make(arg) for name, make in METHODS.items()}
  for name, make in dict(FedAvg=fedavg.get_config, **METHODS).items():
    configs[f'{name} (homogeneous)'] = make(f'{arg},homogeneous')
  for name in ('FedHe', 'FD', 'Private'):
    configs[f'{name} (Dirichlet 0.5)'] = METHODS[name](f'{arg},dirichlet')
  return configs


def paper(dataset: str):
  """What the paper says of these rows."""
  found = {}
  for name in ('FedAvg', *METHODS):
    found[name] = paper_targets.fedhe(name, dataset, False)
    found[f'{name} (homogeneous)'] = paper_targets.fedhe(name, dataset, True)
  return {name: target for name, target in found.items() if target}


def get_table() -> Table:
  """Twelve rows, three seeds.

  Run: `python -m launch.sweep --table=configs/tables/fedhe_mnist.py
  --data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its sections V-C to V-E.
  """
  return Table(
      title='FedHe and its baselines on MNIST',
      setting=SETTING,
      rows=rows('mnist'),
      paper=paper('mnist'),
      seeds=(0, 1, 2),
      mean='clients',
      families=FAMILIES,
      bars=tuple(METHODS),
  )
