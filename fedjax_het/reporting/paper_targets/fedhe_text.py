"""FedHe's accuracies (arXiv 2110.09910), which its text gives in words."""

from collections.abc import Mapping
from typing import Any

from fedjax_het.reporting.paper_targets.target import Target, models

_FEDHE_SETTING = (
    '10 clients with {nets}, IID, three minibatches a visit, Adam 1e-3, full '
    'width'
)
# Homogeneous MNIST and CIFAR-10, then heterogeneous ones; in words.
_FEDHE = {
    'FedAvg': ('99', 'almost 69', None, None),
    'FedHe': ('98.9', '66', '98.5', '62'),
    'Private': ('98.4', '62.5', '98', '57'),
    'FedMD': ('97.9', '60.9', '98', '57.5'),
}
# Section V-E, heterogeneous CIFAR-10: clients 0 to 4, then clients 5 to 9.
_FEDHE_FAMILIES = {'FedHe': ('58', '65'), 'Private': ('52-53', '61')}
_FEDHE_CLIENTS = ('57-59', 'near 62-66')

_NAMES = dict(fedavg='FedAvg', fedhe='FedHe', private='Private', fedmd='FedMD')


def find(config: Mapping[str, Any]) -> list[Target]:
  """The accuracy of a config's method with the paper's nets, IID; or []."""
  name, nets = config['algorithm']['name'], models(config)
  homogeneous = nets == {'fedhe_cnn9'}
  if (
      name not in _NAMES
      or config['partition']['name'] != 'iid'
      or not (homogeneous or nets == {f'fedhe_cnn{i}' for i in range(10)})
  ):
    return []
  found = fedhe(_NAMES[name], config['dataset'], homogeneous)
  return [] if found is None else [found]


def fedhe(method: str, dataset: str, homogeneous: bool) -> Target | None:
  """The accuracies in the text of FedHe's sections V-C to V-E."""
  if dataset not in ('mnist', 'cifar10') or method not in _FEDHE:
    return None
  words = _FEDHE[method][2 * (not homogeneous) + (dataset == 'cifar10')]
  if words is None:
    return None
  nets = 'model 9 everywhere' if homogeneous else 'the ten CNNs of Table II'
  return Target(
      'FedHe, sections V-C to V-E', method, _FEDHE_SETTING.format(nets=nets),
      float(words.split()[-1]), printed=words,
  )  # fmt: skip


def fedhe_family(method: str, deeper: bool) -> Target | None:
  """FedHe's Fig. 8 in words: the mean over half of the clients on CIFAR-10."""
  if method not in _FEDHE_FAMILIES:
    return None
  return _fedhe_models(8, method, _FEDHE_FAMILIES[method][deeper], deeper)


def fedhe_client(number: int) -> Target:
  """FedHe's Fig. 7 in words: one of its ten clients on CIFAR-10."""
  deeper = number > 4
  return _fedhe_models(7, 'FedHe', _FEDHE_CLIENTS[deeper], deeper)


def _fedhe_models(
    figure: int, method: str, words: str, deeper: bool
) -> Target:
  ends = [float(end) for end in words.split()[-1].split('-')]
  nets = 'clients 5-9, three' if deeper else 'clients 0-4, two'
  return Target(
      f'FedHe, Fig. {figure} and section V-E', method,
      _FEDHE_SETTING.format(nets=f'the ten CNNs of Table II ({nets} '
                            'convolutions)'),
      sum(ends) / len(ends), printed=words,
  )  # fmt: skip
