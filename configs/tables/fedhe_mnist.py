"""FedHe's comparison on MNIST, narrowed and shortened for two CPU cores."""

from fedjax_het.configs import fd, fedavg, fedhe, fedmd, private
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

# {method: (`get_config` of its file, variants)}.
METHODS = {
    'FedHe': (fedhe.get_config, ''),
    'FedHe as coded': (fedhe.get_config, 'code'),
    'FedMD': (fedmd.get_config, ''),
    'FedMD aligned on 150': (fedmd.get_config, 'aligned'),
    'FD': (fd.get_config, ''),
    'FD with logits': (fd.get_config, 'logit'),
    'Private': (private.get_config, ''),
}
# Methods without a public set, which would have all clients' labels.
SKEWED = ('FedHe', 'FedHe as coded', 'FD', 'FD with logits', 'Private')
BARS = ('FedHe', 'FedHe as coded', 'FedMD', 'FD', 'Private')
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
    'visits of 150 images. All methods keep each client\'s Adam between its '
    'visits, FedAvg too. FedHe is Eq. 8 of the paper; as coded, uploads are '
    'divided by V and the past is folded every 100 uploads, as in its '
    'authors\' code. FedMD sets a tenth of the training set aside as '
    'public, trains one epoch on it and one on the private data before round '
    '1 (the others do not), and digests 10 public examples a round, as the '
    'paper says of its experiments; aligned on 150, as many as a visit has '
    'private ones. FD exchanges the softmax outputs of its papers; with '
    'logits, those of re-implementations.'
)


def rows(dataset: str):
  """The rows of a data set, heterogeneous ones first."""

  def config(name, variant=''):
    make, own = methods[name]
    return make(f'fedhe,{dataset},cpu,{own},{variant}')

  methods = {'FedAvg': (fedavg.get_config, ''), **METHODS}
  configs = {name: config(name) for name in METHODS}
  for name in methods:
    configs[f'{name} (homogeneous)'] = config(name, 'homogeneous')
  for name in SKEWED:
    configs[f'{name} (Dirichlet 0.5)'] = config(name, 'dirichlet')
  return configs


def paper(dataset: str):
  """The paper's remarks on these rows."""
  found = {}
  for name in ('FedAvg', 'FedHe', 'FedMD', 'Private'):
    found[name] = paper_targets.fedhe(name, dataset, False)
    found[f'{name} (homogeneous)'] = paper_targets.fedhe(name, dataset, True)
  return {name: target for name, target in found.items() if target}


def get_table() -> Table:
  """Twenty rows, three seeds.

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
      bars=BARS,
  )
