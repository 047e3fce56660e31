"""FedIN v2's Table 1: ResNets of five depths on four data sets, two splits."""

from fedjax_het.configs.tables import _papers

from fedjax_het.configs import (
  fedavg,
  feddpa,
  fedet,
  fedfomo,
  fedgen,
  fedin,
  fednova,
  fedprox,
  fedrolex,
  fedselect,
  heterofl,
  inclusivefl,
  incoavg,
  moon,
  scaffold,
  scalefl,
)
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMNS = _papers.fedin_columns(
    ('fashion_mnist', 'svhn_cropped', 'cifar10', 'cinic10')
)
METHODS = {
    'FedAvg': (fedavg.get_config, 'v2'),
    'FedProx': (fedprox.get_config, 'v2'),
    'SCAFFOLD': (scaffold.get_config, 'v2'),
    'FedNova': (fednova.get_config, 'v2'),
    'MOON': (moon.get_config, 'v2'),
    'HeteroFL': (heterofl.get_config, 'v2'),
    'FedGen': (fedgen.get_config, 'v2'),
    'FedFomo': (fedfomo.get_config, 'v2'),
    'InclusiveFL': (inclusivefl.get_config, 'v2'),
    'FedET': (fedet.get_config, 'v2'),
    'FedRolex': (fedrolex.get_config, 'v2'),
    'InCoAvg': (incoavg.get_config, 'v2'),
    'FedDPA': (feddpa.get_config, 'v2'),
    'ScaleFL': (scalefl.get_config, 'v2'),
    'FedSelect': (fedselect.get_config, 'v2'),
    'FedIN': (fedin.get_config, 'v2'),
    'FedIN +Noise': (fedin.get_config, 'v2,noise'),
}
# The paper's Table 3: millions of numbers that are sent, MB of memory.
OVERHEADS = {
    'FedAvg': ('12.28', '235.0'),
    'SCAFFOLD': ('24.56', '470.0'),
    'MOON': ('12.28', '705.0'),
    'HeteroFL': ('16.29', '445.6'),
    'FedRolex': ('16.29', '445.6'),
    'InclusiveFL': ('12.28', '235.0'),
    'ScaleFL': ('20.65', '574.8'),
    'InCoAvg': ('12.28', '235.0'),
    'FedIN': ('12.35', '235.3'),
}
SETTING = (
    '100 clients of ResNet10, 14, 18, 22 and 26 (20 each), 10 a round, 500 '
    'rounds of 5 local epochs, batch 16, Adam 1e-3; non-IID is Dirichlet 0.5 '
    "over clients. As the authors' code for the same nets (InCo): the last "
    'partial batch of an epoch is left out, and accuracies are averaged over '
    'the five models. The paper leaves open: augmentation, here none (that '
    'code: crops, flips and cut-outs, but none on Fashion-MNIST); the size of '
    'Fashion-MNIST, here 28x28 (that code: 32x32). Optimisers begin anew in '
    'every visit.'
)
CPU = 'Here with widths a quarter and 20 rounds of 2 local epochs.'


def get_table(scale: str = SCALES[0]) -> Table:
  """The methods on eight columns, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_table1 --data_dir=DIR`, a part:
  `--rows=FedAvg,FedIN --cols=cifar10_iid`. The paper's Table 3:
  `python -m launch.communication --table=fedin_v2_table1 --scale=full
  --cols=cifar10_iid --data_dir=DIR`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  rows = _papers.fedin_rows(METHODS, COLUMNS, scale)
  if scale == 'full':
    for row in ('HeteroFL', 'FedRolex', 'ScaleFL'):
      for config in rows[row].values():
        for group in config.groups.values():
          # As large as the other methods' models on average.
          group.model = 'resnet152'
  names = {label: label for label in METHODS}
  names['FedIN +Noise'] = 'FedIN (+Noise)'
  return Table(
      title='FedIN v2, Table 1',
      setting=_papers.in_words(
          scale,
          f'{SETTING} HeteroFL: widths of one ResNet152, drawn anew by every '
          'client in every visit. FedRolex: the same widths, each for a fifth '
          'of the clients, and the accuracy of the full width. ScaleFL: five '
          'levels of the same net, each for a fifth of the clients and '
          'evaluated at its last exit; the paper leaves exits and ratios open. '
          'FedET: a tenth of the training set is public, without labels, and a '
          'ResNet26 is on the server; the accuracies are those of the small '
          'models.',
          f'{CPU} HeteroFL, FedRolex and ScaleFL: parts of a ResNet26.',
      ),
      rows=rows,
      paper=_papers.fedin_paper(paper_targets.fedin_v2_table_1, names, COLUMNS),
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
      # The numbers are for the paper's nets, which other scales do not have.
      overheads=OVERHEADS if scale == 'full' else {},
  )
