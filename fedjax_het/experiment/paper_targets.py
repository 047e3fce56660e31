"""What the papers print for a setting, to stand beside a result of ours.

Accuracies in percent. FedIN v1 is arXiv 2304.00759; FedIN v2 the later
journal version of the same title. Values that the papers only plot, or that
are lost in the available texts (v2 Tables 5 and 7), are not here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
  """One printed accuracy.

  Attributes:
    source: Paper and table.
    method: As printed.
    setting: The paper's setting in words.
    accuracy: In percent.
    spread: Standard deviation over seeds as printed; None if none is.
    reached: First round at `level`, as printed; None if it is not.
    level: Accuracy in percent to which `reached` refers.
  """

  source: str
  method: str
  setting: str
  accuracy: float
  spread: float | None = None
  reached: int | None = None
  level: float | None = None


_V1 = (
    '10 clients of models A2 B1 C2 D2 E3, all sampled, 200 rounds, Adam 1e-3 '
    'then 1e-4, 5 (CIFAR-10) or 1 (F-MNIST) local epochs, {split}, one run, '
    'last round'
)
_V2 = (
    '100 clients, 10 sampled, {nets}, 5 local epochs, batch 16, Adam, {split}, '
    '{seeds}'
)
_RESNETS = 'ResNet10/14/18/22/26 in equal parts, 500 rounds'
_VITS = 'ImageNet ViT-S of 8 to 12 blocks in equal parts, 100 rounds'
_DATASETS = ('fashion_mnist', 'svhn_cropped', 'cifar10', 'cinic10')

# v1 Table II: CIFAR-10 IID, non-IID, F-MNIST IID, non-IID.
_V1_TABLE_2 = {
    'FedIN': (81.47, 63.00, 91.35, 88.28),
    'FedAvg': (76.43, 60.02, 89.59, 76.83),
}
# v2 Tables 1 and 2, per data set: IID, non-IID±deviation, first round.
_V2_TABLE_1 = {
    'FedAvg': '90.3 89.2±1.1 47 89.2 84.3±1.2 82 76.8 65.7±1.8 109 64.7 '
    '55.8±2.9 103',
    'FedProx': '89.7 87.8±0.5 40 90.6 87.1±1.0 45 77.6 72.5±1.2 72 66.8 '
    '57.5±2.3 98',
    'FedIN': '91.2 90.2±1.2 20 91.8 89.4±1.3 29 80.5 74.8±2.3 54 70.1 '
    '61.7±2.8 86',
    'FedIN (+Noise)': '91.3 90.6±1.3 18 92.9 91.0±1.5 26 83.2 77.3±2.5 52 '
    '72.6 63.4±2.5 70',
}
_V2_TABLE_2 = {
    'FedAvg': '93.2 92.4±0.9 20 93.5 92.3±1.0 13 94.6 93.7±1.5 14 84.4 '
    '83.2±1.9 20',
    'FedProx': '93.4 92.2±0.7 18 93.9 92.8±1.1 14 95.0 94.0±1.3 13 84.2 '
    '83.3±1.6 23',
    'FedIN': '93.5 93.0±1.0 15 94.8 93.4±1.2 11 96.0 94.7±1.3 12 88.4 '
    '87.3±1.7 14',
    'FedIN (+Noise)': '93.4 93.6±1.1 15 94.9 94.0±1.5 11 96.0 95.2±1.2 11 '
    '88.1 87.9±1.5 13',
}
_LEVELS = {1: (85, 80, 60, 50), 2: (90, 90, 60, 80)}
# v2 Table 4, F-MNIST, averaging inside identical shapes: IID, non-IID.
_V2_TABLE_4 = {'FedAvg': (86.1, 85.4), 'FedProx': (83.4, 82.1),
               'FedIN': (88.9, 88.0)}  # fmt: skip
# v2 Table 6, CIFAR-10, by number of clients: IID and non-IID.
_V2_CLIENTS = (10, 20, 50, 100, 200)
_V2_TABLE_6 = {
    'FedAvg': ((79.3, 79.2, 78.7, 76.8, 74.0), (68.3, 67.9, 66.9, 66.2, 62.5)),
    'FedIN': ((82.8, 83.1, 81.0, 80.5, 74.3), (76.7, 76.3, 74.1, 75.9, 72.2)),
}


def method_name(algorithm: Mapping[str, Any]) -> str | None:
  """The papers' name of a method with these options; None if they have none.

  Args:
    algorithm: The config's section, as a plain dict.

  Returns:
    Such as 'FedIN (+Noise)'. Ablations whose numbers are lost have none.
  """
  name = algorithm['name']
  if name in ('fedavg', 'fedprox'):
    return {'fedavg': 'FedAvg', 'fedprox': 'FedProx'}[name]
  if name != 'fedin' or not algorithm.get('in_training', True):
    return None
  if algorithm.get('rule') == 'sequential':
    return None
  if algorithm.get('aggregation') == 'none':
    return None
  if algorithm.get('aggregation') != 'ends' and not algorithm.get('mu', 0.1):
    return None
  noise = algorithm.get('noise', 0.0)
  return {0.0: 'FedIN', 0.8: 'FedIN (+Noise)'}.get(noise)


def find(config: Mapping[str, Any]) -> list[Target]:
  """The printed accuracies of a config's method on its data and split.

  Args:
    config: The config as nested dicts. Models, rounds and all else may differ
      from the paper's: each target says its own setting.

  Returns:
    The targets, maybe none.
  """
  method = method_name(config['algorithm'])
  partition = config['partition']
  iid = partition['name'] == 'iid'
  if method is None or not (
      iid
      or (partition['name'].startswith('dirichlet')
      and partition.get('alpha') == 0.5)
  ):
    return []
  aggregation = config['algorithm'].get('aggregation', 'layerwise')
  if aggregation == 'ends':
    return _from_v1(method, config['dataset'], iid)
  if aggregation == 'architecture':
    return _from_table_4(method, config['dataset'], iid)
  vits = all(_model(name, g).startswith('vit') for name, g in
             config['groups'].items())  # fmt: skip
  number = sum(
      g['clients'] if isinstance(g, Mapping) else g
      for g in config['groups'].values()
  )
  targets = _from_tables_1_2(method, config['dataset'], iid, vits)
  if not vits and config['dataset'] == 'cifar10':
    targets += _from_table_6(method, number, iid)
  return targets


def _model(name: str, group: Any) -> str:
  return group.get('model', name) if isinstance(group, Mapping) else name


def _split(iid: bool) -> str:
  return 'IID' if iid else 'Dirichlet 0.5'


def _v2(iid: bool, nets: str = _RESNETS) -> str:
  seeds = 'one run' if iid else 'three seeds'
  return _V2.format(nets=nets, split=_split(iid), seeds=seeds)


def _from_v1(method: str, dataset: str, iid: bool) -> list[Target]:
  offset = {'cifar10': 0, 'fashion_mnist': 2}.get(dataset)
  if offset is None or method not in _V1_TABLE_2:
    return []
  value = _V1_TABLE_2[method][offset + (not iid)]
  setting = _V1.format(split=_split(iid))
  return [Target('FedIN v1, Table II', method, setting, value)]


def _from_tables_1_2(
    method: str, dataset: str, iid: bool, vits: bool
) -> list[Target]:
  if dataset not in _DATASETS:
    return []
  number = 2 if vits else 1
  table, nets = (
      (_V2_TABLE_2, _VITS) if vits else (_V2_TABLE_1, _RESNETS)
  )
  source, setting = f'FedIN v2, Table {number}', _v2(iid, nets)
  place = _DATASETS.index(dataset)
  printed = table[method].split()[3 * place : 3 * place + 3]
  if iid:
    return [Target(source, method, setting, float(printed[0]))]
  accuracy, spread = map(float, printed[1].split('±'))
  level = float(_LEVELS[number][place])
  reached = int(printed[2])
  return [Target(source, method, setting, accuracy, spread, reached, level)]


def _from_table_4(method: str, dataset: str, iid: bool) -> list[Target]:
  if dataset != 'fashion_mnist' or method not in _V2_TABLE_4:
    return []
  setting = _v2(iid) + ', averaging inside an architecture'
  value = _V2_TABLE_4[method][not iid]
  return [Target('FedIN v2, Table 4', method, setting, value)]


def _from_table_6(method: str, number: int, iid: bool) -> list[Target]:
  if number not in _V2_CLIENTS or method not in _V2_TABLE_6:
    return []
  value = _V2_TABLE_6[method][not iid][_V2_CLIENTS.index(number)]
  setting = _v2(iid).replace('100 clients, 10', f'{number} clients, some', 1)
  return [Target('FedIN v2, Table 6', method, setting, value)]
