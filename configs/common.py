"""Variants shared by all configs: paper settings, data sets, partitions.

`get_config(method, arg, variants)` composes variants, `--config=FILE:a,b`. The
variant `file=PATH` takes the partition from a file. Variants are applied in the
order data set, setting, split, model, method, size, clock, whatever their order
on the command line. At most one of each kind is allowed, except for the
method's own.

Settings of the papers: 'v1' is FedIN's first version (arXiv 2304.00759), 'v2'
the later journal version of the same title; 'fedhe' is `fedhe_setting.py`;
'fedepth' is the case study of FeDepth (arXiv 2303.04887). Comments mark values
that a paper does not state. 'text' belongs to no paper: networks for token ids.
"""

from collections.abc import Callable, Mapping

import ml_collections
import numpy as np

from fedjax_het.configs import fedhe_setting
from fedjax_het.experiment.config import default_config, group_spec
from fedjax_het.models import model_options
from fedjax_het.names import check_name

Variant = Callable[[ml_collections.ConfigDict], None]
# FedIN v2 reports the first round at these mean accuracies (ResNets, Table 1).
TARGETS = dict(
    fashion_mnist=0.85, svhn_cropped=0.80, cifar10=0.60, cinic10=0.50
)


def base(method: str) -> ml_collections.ConfigDict:
  """The default experiment: digits, ten clients, three ResNets, non-IID."""
  config = default_config(method)
  config.target_accuracy = 0.90
  return config


def _dataset(name: str) -> Variant:
  def apply(config):
    config.dataset = name
    config.target_accuracy = TARGETS.get(name, 0.90)

  return apply


def _v1(config):
  """FedIN v1: 10 clients of five models, all of them every round.

  The paper does not state augmentation and Fashion-MNIST's size: here nothing
  is augmented and images stay 28x28. The authors' code for the same
  networks (Felo and Velo) does not augment either, but resizes Fashion-MNIST
  to 32x32 (`--config.image_size=32`); FedML, on which the paper builds, crops,
  flips and cuts out on CIFAR-10 (`--config.local.augment=crop_flip_cutout`).
  """
  if config.dataset == 'digits':
    _dataset('cifar10')(config)
  config.groups = ml_collections.ConfigDict(
      dict(fedin_a=2, fedin_b=1, fedin_c=2, fedin_d=2, fedin_e=3)
  )
  config.model = ml_collections.ConfigDict(dict(norm='batch'))
  config.num_rounds = 200
  config.local.batch_size = 64  # The paper gives none.
  config.local.learning_rate = 1e-3
  config.local.schedule = 'step'
  # The paper's two data sets; others follow the first.
  config.local.epochs = 1 if config.dataset == 'fashion_mnist' else 5
  config.local.lr_rounds = (
      (60,) if config.dataset == 'fashion_mnist' else (25,)
  )
  # As in FedML's loaders, on which the paper builds; the paper does not say.
  config.local.drop_last = True
  config.partition.min_size = 64  # A batch.
  algorithm = config.algorithm
  if 'aggregation' in algorithm:
    algorithm.aggregation = 'ends'
  if algorithm.name == 'fedin':
    algorithm.mu = 0.0
    algorithm.lam = 2.0
    algorithm.capture = 'training'
    # The paper's server keeps all pairs in one store and sends all clients the
    # same ones. Here it keeps the latest 1,024 of each client, which bounds
    # memory, and draws new pairs for each client, first from other clients.
    algorithm.num_pairs = 1024


def _v2(config):
  """FedIN v2: 100 clients of ResNet10 to 26, ten of them every round.

  The paper does not state augmentation and Fashion-MNIST's size: here nothing
  is augmented and images stay 28x28. The authors' code for the same
  networks (InCo) crops, flips and cuts out on CIFAR-10
  (`--config.local.augment=crop_flip_cutout`), and resizes Fashion-MNIST to
  32x32 (`--config.image_size=32`) without augmentation.
  """
  if config.dataset == 'digits':
    _dataset('cifar10')(config)
  config.groups = ml_collections.ConfigDict(
      {f'resnet{depth}': 20 for depth in (10, 14, 18, 22, 26)}
  )
  config.model = ml_collections.ConfigDict(
      dict(width=1.0, stem='imagenet', norm='batch')
  )
  config.cohort_size = 10
  config.num_rounds = 500
  config.local.epochs = 5
  config.local.batch_size = 16
  # As in the authors' code (InCo); the paper does not say.
  config.local.drop_last = True
  config.local.learning_rate = 1e-3
  config.checkpoint_every = 10


def fedepth_net(**options):
  """Options of FeDepth's PreResNet-20, as in its authors' code.

  The paper names the net of He et al., whose shortcut is x if the shape does
  not change: `preact_shortcut=False`.
  """
  return dict(
      dict(
          width=1.0,
          norm='batch_only',
          init='torch',
          preact_shortcut=True,
          head_relu=True,
      ),
      **options,
  )


def _fedepth(config):
  """FeDepth: 100 clients with PreResNet-20, in quarters by memory.

  Width methods replace the quarters by groups with widths, such as
  `groups.sixth.rate`.
  """
  if config.dataset == 'digits':
    _dataset('cifar10')(config)
  config.groups = ml_collections.ConfigDict({
      name: dict(model='preresnet20', clients=25)
      for name in ('x1_6', 'x1_3', 'x1_2', 'x1')
  })
  config.model = ml_collections.ConfigDict(fedepth_net())
  _split('dirichlet_balanced', alpha=0.3)(config)
  config.cohort_size = 10
  config.num_rounds = 500
  config.local.epochs = 10
  config.local.batch_size = 128
  config.local.optimizer = 'sgd'
  config.local.learning_rate = 0.1  # The code's scripts take 0.01.
  config.local.schedule = 'cosine'
  config.local.momentum = 0.9  # From here on the paper is silent.
  config.local.weight_decay = 5e-4
  # Where a split is a Dirichlet, the code has 'crop_flip_once'.
  config.local.augment = 'crop_flip'
  config.eval_batch_size = 128  # Norms take the statistics of a test batch.
  config.checkpoint_every = 10
  if 'weights' in config.algorithm:
    config.algorithm.weights = 'data'


def set_options(**options) -> Variant:
  """A variant that sets options of the method."""

  def apply(config):
    for name, value in options.items():
      config.algorithm[name] = value

  return apply


def _text(config):
  """Ten clients of three text nets, for token ids in a file of the user's."""
  config.groups = ml_collections.ConfigDict({
      f'text{depth}': dict(model='text', clients=clients, depth=depth)
      for depth, clients in ((1, 4), (2, 3), (3, 3))
  })
  config.model = ml_collections.ConfigDict(dict(vocabulary=256, width=1.0))
  config.local.learning_rate = 5e-3  # Most words are rare.


# Averages inside each architecture only.
architecture = set_options(aggregation='architecture')


def local_norm(config):
  """A variant in which running statistics stay on the client."""
  config.local_stats = True


def _split(name: str, **options) -> Variant:
  """A partition with these options; its seed stays."""

  def apply(config):
    config.partition = ml_collections.ConfigDict(
        dict(name=name, seed=config.partition.seed, **options)
    )

  return apply


def _homogeneous(config):
  """All clients hold one net: FedIN v2's Table 5a, and FedHe's model 9."""
  model = 'fedhe_cnn9' if 'fedhe_cnn9' in config.groups else 'resnet18'
  number = sum(group_spec(config, name).clients for name in config.groups)
  config.groups = ml_collections.ConfigDict({model: number})
  # Drops options that the new net lacks, such as those of FeDepth's net.
  known = model_options(model)
  config.model = ml_collections.ConfigDict(
      {k: v for k, v in config.model.items() if k in known}
  )


def _cpu(config):
  """A quarter of the width and few rounds: minutes on two CPU cores.

  If a visit is only a few minibatches, the width is an eighth: most of the time
  then goes into evaluating every client's model.
  """
  models = {group_spec(config, name).model for name in config.groups}
  if models == {'preresnet20'}:
    return _cpu_thin(config)
  few = config.local.steps is not None
  config.model.width = 0.125 if few else 0.25
  config.num_rounds = 60 if few else 20
  config.local.epochs = 2
  config.eval_every = 30 if few else 5
  config.target_accuracy = 0.70  # In reach of so few rounds.
  # A few personal models of each group represent all of them.
  config.eval_clients_per_group = 4


def _cpu_thin(config):
  """Fewer and smaller steps for FeDepth's net, which has only 16 channels."""
  config.num_rounds = 20
  config.local.epochs = 1
  config.local.batch_size = 32
  config.eval_every = config.checkpoint_every = 5
  config.target_accuracy = 0.30  # In reach of so few rounds.


def _quick(config):
  """Two rounds of three small dense models, in seconds, to test the setup."""
  config.groups = ml_collections.ConfigDict({
      f'mlp{depth}': dict(model='mlp', clients=2, depth=depth)
      for depth in (2, 3, 4)
  })
  config.model = ml_collections.ConfigDict(dict(hidden=32, norm='batch'))
  if config.cohort_size is not None:
    config.cohort_size = min(config.cohort_size, 6)
  config.num_rounds = 2
  config.local.epochs = 1


# {class of devices: (percentage of clients, device)}. The values are assumed,
# not measured. Speeds are 10 : 4 : 1, as of a recent phone, an older phone and
# a small board; one such core trains nets as small as those of the digits with
# hundreds of images per second. Links are like home WiFi, 4G and poor 3G
# reception, slower up than down.
FLEET = dict(
    fast=(50, dict(
        examples_per_second=1000.0, up=2.5e6, down=1e7, latency=0.02,
        jitter=0.1,
    )),
    medium=(30, dict(
        examples_per_second=400.0, up=1.25e6, down=5e6, latency=0.05,
        jitter=0.1,
    )),
    # Stragglers: they are slow, pause between visits, and lose 5 % of visits.
    slow=(20, dict(
        examples_per_second=100.0, up=1.25e5, down=5e5, latency=0.2,
        jitter=0.3, pause=1.0, drop_out=0.05,
    )),
)  # fmt: skip


def _by_tiers(config):
  """A round is one of a group; by name, the first get the fastest devices."""
  config.clock.device_seed = None
  smallest = min(group_spec(config, name).clients for name in config.groups)
  if config.cohort_size is not None and config.cohort_size > smallest:
    config.cohort_size = None


def _clock(mode: str) -> Variant:
  def apply(config):
    config.clock.mode = mode
    # Without a seed, the largest models would all get the slowest devices.
    config.clock.device_seed = 0
    number = sum(group_spec(config, name).clients for name in config.groups)
    ends = np.cumsum([share for share, _ in FLEET.values()]) * number // 100
    counts = np.diff(ends, prepend=0).tolist()
    config.devices = ml_collections.ConfigDict({
        name: dict(clients=clients, **device)
        for (name, (_, device)), clients in zip(
            FLEET.items(), counts, strict=True
        )
        if clients
    })
    if mode == 'tiers':
      _by_tiers(config)

  return apply


# An example of the largest of the digits' nets, a ResNet10, takes 2e7
# operations, so that net trains at FLEET's examples per second.
_FLOPS_PER_EXAMPLE = 2e7


def _flops(config):
  """Speeds in operations; groups with most of them get the fastest devices."""
  if not config.devices:
    raise ValueError(
        'The variant flops is about the speed of devices; it needs a clock: '
        f'{", ".join(CLOCKS)}.'
    )
  config.clock.device_seed = None
  config.clock.device_by_work = True
  for device in config.devices.values():
    device.flops_per_second = device.examples_per_second * _FLOPS_PER_EXAMPLE
    del device['examples_per_second']


DATA = {
    name: _dataset(name)
    for name in (
        'mnist',
        'fashion_mnist',
        'cifar10',
        'cifar100',
        'svhn_cropped',
        'cinic10',
    )
}
SETTINGS = {
    'v1': _v1,
    'v2': _v2,
    'fedhe': fedhe_setting.apply,
    'fedepth': _fedepth,
    'text': _text,
}
SPLITS = {
    'iid': _split('iid'),
    # Each class over the clients by a Dirichlet draw; sizes vary, but hold a
    # batch of any setting.
    'dirichlet': _split('dirichlet', alpha=0.5, min_size=64),
    # Each client's class shares from a Dirichlet; sizes are equal.
    'balanced': _split('dirichlet_balanced', alpha=0.5),
    # Two shards of sorted labels per client.
    'shards': _split('shards', shards_per_client=2),
    # Two classes per client; sizes are equal.
    'beta': _split('beta', labels_per_client=2),
}
MODELS = {'homogeneous': _homogeneous}
SIZES = {'cpu': _cpu, 'quick': _quick}
SPEEDS = {'flops': _flops}
# All clocks have the same devices, so that virtual times are comparable.
CLOCKS = {
    mode: _clock(mode)
    for mode in ('synchronous', 'async', 'sequential', 'tiers')
}


def get_config(
    method: str,
    arg: str,
    variants: Mapping[str, Variant] = {},
    default: Variant = lambda config: None,
) -> ml_collections.ConfigDict:
  """The config of a method with the variants that `arg` names.

  Args:
    method: A key of `ALGORITHMS`.
    arg: Names of variants, separated by commas; '' for none.
    variants: The method's own variants, applied in their order.
    default: Changes for the method's default experiment, applied first.

  Returns:
    The config.

  Raises:
    ValueError: If a variant is unknown, or two exclude each other.
  """
  names = [name for name in arg.split(',') if name]
  splits = SPLITS | {
      name: _split('file', file=name.removeprefix('file='))
      for name in names
      if name.startswith('file=')
  }
  kinds = (DATA, SETTINGS, splits, MODELS, variants, SIZES, CLOCKS, SPEEDS)
  known = [name for kind in kinds for name in kind]
  for name in names:
    check_name('variant', name, known)
  config = base(method)
  default(config)
  for kind in kinds:
    chosen = [name for name in kind if name in names]
    if len(chosen) > 1 and kind is not variants:
      raise ValueError(
          f'The variants {" and ".join(chosen)} exclude each other.'
      )
    for name in chosen:
      kind[name](config)
  return config
