"""FedHe's sections V-C to V-E: one model or ten, on two data sets."""

from fedjax_het.configs.tables import _papers

from fedjax_het.configs import fd, fedavg, fedhe, fedmd, private
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
# Data set, and whether all clients hold model 9.
COLUMNS = {
    f'{dataset} {kind}': (dataset, kind == 'homogeneous')
    for kind in ('homogeneous', 'heterogeneous')
    for dataset in ('mnist', 'cifar10')
}
METHODS = {
    'FedAvg': (fedavg.get_config, ''),
    'FedHe': (fedhe.get_config, ''),
    'FedHe as coded': (fedhe.get_config, 'code'),
    'Private': (private.get_config, ''),
    'FedMD': (fedmd.get_config, ''),
    'FedMD aligned on more': (fedmd.get_config, 'aligned'),
    'FedMD not pre-trained': (fedmd.get_config, 'cold'),
    'FD': (fd.get_config, ''),
}
PAPER = ('FedAvg', 'FedHe', 'Private', 'FedMD')


def _row(method: str, scale: str):
  """The cells of a method; FedAvg has no heterogeneous cells."""
  get_config, variants = METHODS[method]
  return {
      column: _papers.at_scale(
          get_config,
          f'fedhe,{dataset},{variants}' + ',homogeneous' * homogeneous,
          scale,
      )
      for column, (dataset, homogeneous) in COLUMNS.items()
      if homogeneous or method != 'FedAvg'
  }


def get_table(scale: str = SCALES[0]) -> Table:
  """All of the paper's rows and columns, three seeds.

  Run: `python -m launch.sweep --table=fedhe_section5 --data_dir=DIR`. With
  label skew and the accuracy of every model: `fedhe_mnist`, `fedhe_cifar10`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table; the paper states the numbers in its text.
  """
  full = (
      'Ten clients with a tenth of the training set each: the ten CNNs of the '
      'paper, or model 9 everywhere. 5,000 rounds, in which each client trains '
      'on three minibatches of 50, Adam 1e-3, kept between its visits by '
      'every method. FedHe is Eq. 8; as coded, uploads are divided by V and '
      'the past is folded every 100 uploads. FedMD sets a tenth of the '
      'training set aside as public, on which it trains before round 1 (the '
      'others do not), and digests 10 public examples a round, as the paper '
      'says of its experiments; aligned on more, the 5,000 of FedMD\'s own '
      'paper, against the same three private minibatches; not pre-trained, it '
      'begins with its private data. FD exchanges softmax outputs.'
  )
  cpu = (
      'Here with widths an eighth and 60 rounds; four of the personal models '
      'of model 9 are evaluated; FedMD trains one epoch on the public and one '
      'on the private data before round 1; aligned on more, it digests 150 '
      'public examples a round.'
  )
  return Table(
      title='FedHe, sections V-C to V-E',
      setting=_papers.in_words(scale, full, cpu),
      rows={method: _row(method, scale) for method in METHODS},
      paper={
          method: {
              column: paper_targets.fedhe(method, *cell)
              for column, cell in COLUMNS.items()
          }
          for method in PAPER
      },
      seeds=(0, 1, 2),
      mean='clients',
      columns=tuple(COLUMNS),
  )
