"""FedHe's Fig. 8: its clients in two halves, on CIFAR-10."""

from fedjax_het.configs.tables import _papers

from fedjax_het.configs import fedhe, private
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
METHODS = {
    'FedHe': (fedhe.get_config, ''),
    'FedHe as coded': (fedhe.get_config, 'code'),
    'Private': (private.get_config, ''),
}
NUM_CLIENTS = 10
FULL = (
    'CIFAR-10, ten clients with a tenth of the training set each, the ten CNNs '
    'of the paper: clients 0-4 have two convolutions, clients 5-9 three. 5,000 '
    'rounds, in which each client trains on three minibatches of 50, Adam '
    '1e-3, kept between its visits. FedHe is Eq. 8; as coded, uploads are '
    'divided by V and the past is folded every 100 uploads.'
)
CPU = 'Here with widths an eighth and 60 rounds.'


def config_of(method: str, scale: str):
  """A method's config, with about ten evaluations for the curve."""
  get_config, variants = METHODS[method]
  config = _papers.at_scale(get_config, f'fedhe,cifar10,{variants}', scale)
  config.eval_every = max(config.num_rounds // 10, 1)
  return config


def groups_of(config, clients) -> tuple[str, ...]:
  """The groups of some clients; the scale 'quick' has fewer groups."""
  groups = tuple(config.groups)
  return tuple(dict.fromkeys(groups[k % len(groups)] for k in clients))


def get_table(scale: str = SCALES[0]) -> Table:
  """FedHe by Eq. 8 and as coded, and Private, each in two halves.

  Run: `python -m launch.sweep --table=fedhe_fig8 --data_dir=DIR`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table, with curves; the paper states the last values in its text.
  """
  rows = {method: config_of(method, scale) for method in METHODS}
  views, paper = {}, {}
  for method, config in rows.items():
    for begin in (0, 5):
      label = f'{method}: clients {begin}-{begin + 4}'
      views[label] = method, groups_of(config, range(begin, begin + 5))
      if method != 'FedHe as coded':
        paper[label] = paper_targets.fedhe_family(method, begin > 0)
  return Table(
      title="FedHe's Fig. 8: two halves of the clients, CIFAR-10",
      setting=_papers.in_words(scale, FULL, CPU),
      rows=rows,
      paper=paper,
      seeds=(0, 1, 2),
      views=views,
  )
