"""FeDepth's Tables 2 and 3 (arXiv 2303.04887)."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fedjax_het.reporting.paper_targets.target import Target, models

_FEDEPTH_SETTING = (
    '100 clients, 10 sampled, PreResNet-20, 500 rounds of 10 epochs, batch '
    '128, SGD 0.1 with a cosine schedule, {} examples a client for training'
)
# By table; the clients of Table 3 are of unequal sizes.
_FEDEPTH_EXAMPLES = {2: '400', 3: 'on average 399'}
# By table: its columns, and its rows with the decimals that are printed.
_FEDEPTH = {
    2: (
        (
            'cifar10 alpha 0.3', 'cifar10 alpha 1.0', 'cifar10 beta 2',
            'cifar10 beta 5', 'cifar100 alpha 0.3', 'cifar100 alpha 1.0',
            'cifar100 beta 10', 'cifar100 beta 30',
        ),
        {
            'FedAvg x1': '61.00 66.33 32.72 69.95 28.44 29.58 31.86 43.84',
            'FedAvg x1/6': '48.82 54.57 24.94 52.69 15.52 16.50 12.60 18.48',
            'HeteroFL': '52.08 55.53 26.68 56.71 16.76 18.84 19.79 30.26',
            'SplitMix': '54.80 57.61 28.88 57.11 22.10 24.25 19.69 25.00',
            'FeDepth': '59.79 63.39 29.14 60.43 24.51 25.90 22.74 33.49',
            'm-FeDepth': '58.89 62.12 30.50 62.26 30.10 31.26 23.41 38.69',
            'FedAvg x1/8': '46.04 52.86 23.78 47.26 14.25 14.48 11.82 15.93',
            'HeteroFL Lack': '52.21 55.50 26.71 56.01 16.60 18.99 18.90 29.53',
            'SplitMix Lack': '50.34 53.22 25.35 52.73 21.40 22.80 17.91 22.78',
            'FeDepth Lack': '56.79 63.30 28.89 59.09 23.51 26.17 23.15 34.91',
            'm-FeDepth Lack': '57.72 61.08 28.22 59.06 30.59 31.28 23.78 37.54',
            'FeDepth Surplus': '59.82 65.26 30.79 63.27 25.16 27.33 24.21 '
            '35.81',
            'm-FeDepth Surplus': '60.76 64.76 31.34 65.63 32.07 36.52 25.67 '
            '39.90',
        },
    ),
    3: (
        (
            'cifar10 alpha_u 0.3', 'cifar10 alpha_u 1.0',
            'cifar100 alpha_u 0.3', 'cifar100 alpha_u 1.0',
        ),
        {
            'FedAvg x1/6': '46.46 52.02 15.62 17.99',
            'HeteroFL': '46.14 52.20 16.02 18.36',
            'SplitMix': '31.23 44.70 22.68 25.28',
            'FeDepth': '52.61 58.55 23.25 26.16',
            'm-FeDepth': '51.58 57.91 27.86 29.56',
        },
    ),
}  # fmt: skip

# By the shares of the whole model that the clients hold.
_SCENARIOS = {
    frozenset(map(Fraction, shares)): name
    for shares, name in (
        (('1/6', '1/3', '1/2', '1'), ''),
        (('1/8', '1/6', '1/2', '1'), ' Lack'),
        (('1/6', '1/3', '1/2', '2'), ' Surplus'),
    )
}


def find(config: Mapping[str, Any]) -> list[Target]:
  """The accuracy of a config's method with PreResNet-20; or []."""
  if models(config) != {'preresnet20'}:
    return []
  method, column = _method(config), _column(config)
  found = fedepth(method, column) if method and column else None
  return [] if found is None else [found]


def _method(config: Mapping[str, Any]) -> str | None:
  """The paper's name of the method with the clients' budgets, if it has one."""
  algorithm, groups = config['algorithm'], config['groups'].values()
  name = algorithm['name']
  if name == 'fedavg' and algorithm.get('aggregation') != 'none':
    width = Fraction(config['model'].get('width') or 1)
    return f'FedAvg x{width.limit_denominator(100)}'
  option = {'heterofl': 'rate', 'splitmix': 'budget', 'fedepth': 'budget'}
  if name not in option:
    return None
  try:
    shares = frozenset(Fraction(group[option[name]]) for group in groups)
  except (KeyError, TypeError, ValueError):
    return None  # No share, or one in MB.
  scenario = _SCENARIOS.get(shares)
  if scenario is None:
    return None
  fedepth_name = 'm-FeDepth' if algorithm.get('heads') == 'own' else 'FeDepth'
  names = dict(heterofl='HeteroFL', splitmix='SplitMix', fedepth=fedepth_name)
  return names[name] + scenario


def _column(config: Mapping[str, Any]) -> str | None:
  """The paper's column with the data and split; None if it has none."""
  split = config['partition']
  kinds = dict(dirichlet_balanced='alpha', dirichlet='alpha_u', beta='beta')
  kind = kinds.get(split['name'])
  value = split.get('labels_per_client' if kind == 'beta' else 'alpha')
  return kind and f'{config["dataset"]} {kind} {value}'


def fedepth(method: str, column: str) -> Target | None:
  """FeDepth's Tables 2 and 3.

  Args:
    method: The method's name, followed by the budgets if these are not Fair:
      'FeDepth', 'FeDepth Lack'.
    column: Column of Table 2 or 3, such as 'cifar10 alpha 0.3' or 'cifar10
      alpha_u 1.0' (unbalanced).

  Returns:
    The target; None if the paper prints none.
  """
  for number, (columns, rows) in _FEDEPTH.items():
    if column in columns and method in rows:
      words = rows[method].split()[columns.index(column)]
      return Target(
          f'FeDepth, Table {number}', method,
          _FEDEPTH_SETTING.format(_FEDEPTH_EXAMPLES[number]), float(words),
          printed=words,
      )  # fmt: skip
  return None
