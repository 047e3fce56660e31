"""FeDepth's Table 2: three memory budgets, CIFAR-10 and 100, eight splits."""

import functools

from fedjax_het.configs.tables import _papers

from fedjax_het.configs import fedavg, fedepth, heterofl, splitmix
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
# Data set, split, and its parameter.
COLUMNS = {
    f'{dataset} {split} {value}': (dataset, split, value)
    for dataset, labels in (('cifar10', (2, 5)), ('cifar100', (10, 30)))
    for split, values in (('alpha', (0.3, 1.0)), ('beta', labels))
    for value in values
}


def _narrow(width):
  """FedAvg at the width that fits the smallest memory budget."""

  def narrow(arg):
    config = fedavg.get_config(arg)
    if 'width' in config.model:  # The dense nets of `quick` have none.
      config.model.width = width
    return config

  return narrow


# The paper does not say which rows have a label mask, that of the labels in the
# minibatch. In the authors' code HeteroFL and SplitMix have it unless the split
# is IID, and FedAvg has it where clients hold some labels (beta). FeDepth's
# programs have it by default, but all commands that are given start them
# without it (Dirichlet). So printed figures may have a mask.
_unmasked, _masked = (
    functools.partial(_papers.with_options, mask=mask)
    for mask in ('none', 'batch')
)
# {label: (`get_config`, variants)}; budgets are Fair if the label names none.
METHODS = {
    'FedAvg x1': (fedavg.get_config, ''),
    'FedAvg x1 masked': (_masked(fedavg.get_config), ''),
    'FedAvg x1/6': (_narrow(1 / 6), ''),
    'FedAvg x1/6 masked': (_masked(_narrow(1 / 6)), ''),
    'HeteroFL': (_unmasked(heterofl.get_config), 'fair'),
    'HeteroFL masked': (_masked(heterofl.get_config), 'fair'),
    'SplitMix': (_unmasked(splitmix.get_config), 'fair'),
    'SplitMix masked': (_masked(splitmix.get_config), 'fair'),
    'FeDepth': (fedepth.get_config, ''),
    'FeDepth masked': (_masked(fedepth.get_config), ''),
    'm-FeDepth': (fedepth.get_config, 'own_heads'),
    'm-FeDepth masked': (_masked(fedepth.get_config), 'own_heads'),
    'FedAvg x1/8': (_narrow(1 / 8), ''),
    'HeteroFL Lack': (_unmasked(heterofl.get_config), 'lack'),
    'HeteroFL Lack masked': (_masked(heterofl.get_config), 'lack'),
    'SplitMix Lack': (_unmasked(splitmix.get_config), 'lack'),
    'SplitMix Lack masked': (_masked(splitmix.get_config), 'lack'),
    'FeDepth Lack': (fedepth.get_config, 'lack'),
    'm-FeDepth Lack': (fedepth.get_config, 'own_heads,lack'),
    'FeDepth Surplus': (fedepth.get_config, 'surplus'),
    'FeDepth Surplus shared': (fedepth.get_config, 'surplus,shared_partner'),
    'm-FeDepth Surplus': (fedepth.get_config, 'own_heads,surplus'),
}
# Rows of the columns with a few labels a client alone, where the authors'
# FedAvg has the mask.
FEW_LABELS = tuple(
    f'{method} masked'
    for method in ('FedAvg x1', 'FedAvg x1/6', 'FeDepth', 'm-FeDepth')
)
MASKS = (
    'Rows "masked" have the label mask of the authors\' code, which sets '
    'logits of labels absent from the minibatch to 0; the others have the '
    'plain cross-entropy. The paper does not say which of the two its figures '
    'are, so they stand beside both. By default the code has the mask in '
    'HeteroFL and SplitMix unless the split is IID, in FedAvg where clients '
    'hold a few labels (beta), and in FeDepth, whose example commands switch '
    'it off. The optimiser begins anew in every visit.'
)
SETTING = (
    'PreResNet-20, 100 clients of 500 images, ten a round, 500 rounds of ten '
    'epochs (a stage), batch 128, SGD with momentum 0.9 and a cosine schedule '
    'from 0.1, crops and flips, a fifth of every client held out, batch '
    'statistics in the test, too. Images are cropped and flipped anew for each '
    "batch; the authors' program does it once, before the first round, where "
    'the split is a Dirichlet. All methods have the PreResNet-20 of FeDepth; '
    "in the authors' program the shortcut of HeteroFL's is x where the shape "
    "does not change, and FedAvg's and SplitMix's has in addition a bias in "
    f'the stem, and no norm and ReLU before the mean. {MASKS}'
)
UNMASKED = f'{SETTING.removesuffix(MASKS)}No row has a label mask.'
BUDGETS = (
    'A quarter of the clients each hold 1/6, 1/3, 1/2 and all of the model '
    '(Fair); 1/8, 1/6, 1/2 and all (Lack); 1/6, 1/3, 1/2 and twice (Surplus).'
)
# Of `METHODS`.
NOTES = {
    'FeDepth Surplus': (
        'a client whose memory holds two models trains one of its own beside '
        'the common one.'
    ),
    'FeDepth Surplus shared': (
        'all such clients train one second model, which the server averages; '
        "in the authors' program one network goes from client to client."
    ),
}
SUBSET = (
    'Of CIFAR-100 20,000 training images are used, 200 a client, and a part '
    'of the test set is enough, so its figures are not comparable with the '
    "paper's."
)
# With a few labels a client, the authors' program divides the test set by
# labels, too, and its norms take the statistics of a test batch.
OWN = (
    'Columns beta have a second test ("own test"), that of the authors\' '
    'program: each client is tested on a share of the test set with as few '
    'labels (here its own), in one batch, whose statistics the norms take. The '
    'paper speaks of one test set of 10,000 images.'
)
CPU = 'Here 20 rounds of one epoch at batch 32, and nothing is held out.'


def small_cifar100(config):
  """Takes 20,000 images of CIFAR-100, from the official files or a part."""
  if config.dataset == 'cifar100':
    config.train_size, config.verify = 20_000, False
  return config


def _cell(get_config, variants: str, column, scale: str):
  dataset, split, value = column
  arg = f'fedepth,{dataset},{variants}' + ',beta' * (split == 'beta')
  config = _papers.at_scale(get_config, arg, scale)
  if split == 'beta':
    # The digits have only ten labels.
    labels = min(value, 5) if scale == 'quick' else value
    config.partition.labels_per_client = labels
  else:
    config.partition.alpha = value
  if split == 'alpha_u':
    config.partition.name = 'dirichlet'
    # The authors' 50, or enough for a batch and the held-out examples.
    config.partition.min_size = dict(full=160, cpu=50, quick=64)[scale]
  if scale == 'full':
    config.validation = 0.2
    config.personal_test = split == 'beta'  # See `OWN`.
  if scale == 'cpu':
    config = small_cifar100(config)
  return config


def _columns_of(label, columns):
  """The columns in which a row has cells."""
  return {
      name: column
      for name, column in columns.items()
      if label not in FEW_LABELS or column[1] == 'beta'
  }


def cells(methods, columns, scale: str):
  """The configs: {label: {column: config}}."""
  return {
      label: {
          name: _cell(get_config, variants, column, scale)
          for name, column in _columns_of(label, columns).items()
      }
      for label, (get_config, variants) in methods.items()
  }


def of_column(labels, column: str, scale: str):
  """The configs of some rows in one column: {label: config}."""
  methods = {label: METHODS[label] for label in labels}
  rows = cells(methods, {column: COLUMNS[column]}, scale)
  return {label: configs[column] for label, configs in rows.items()}


def target(label: str, column: str):
  """The paper's result for a cell; masked and shared rows have no other."""
  label = label.removesuffix(' masked').removesuffix(' shared')
  return paper_targets.fedepth(label, column)


def paper(methods, columns):
  """The paper's results: {label: {column: target}}."""
  return {
      label: {
          name: target(label, name) for name in _columns_of(label, columns)
      }
      for label in methods
  }


def get_table(scale: str = SCALES[0]) -> Table:
  """All of the paper's rows and columns, with and without label masks.

  Run: `python -m launch.sweep --table=fedepth_table2 --data_dir=DIR`, a part:
  `--rows=FeDepth,HeteroFL --cols=cifar10_alpha_0_3`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table; the paper has one run per cell.
  """
  full = (
      f'{SETTING} {BUDGETS} Columns: balanced Dirichlet of that alpha, or beta '
      f'labels a client. {OWN}'
  )
  return Table(
      title='FeDepth, Table 2',
      setting=_papers.in_words(
          scale, full, f'{CPU} The second test is left out. {SUBSET}'
      ),
      rows=cells(METHODS, COLUMNS, scale),
      paper=paper(METHODS, COLUMNS),
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
      notes=NOTES,
  )
