"""Models whose local steps are measured, and shared arguments of commands."""

import argparse
import functools

import optax

from benchmarks import common, programs
from fedjax_het.algorithms import fedavg
from fedjax_het.models import create

INPUT_SHAPE = (32, 32, 3)
# {model: (batch size, optimizer)} of FedIN, FeDepth, FedHe, the simulators'
# CIFAR-10 benchmark and NIID-Bench, and of a vision transformer.
NETS = {
    'resnet18': (16, optax.adam),
    'preresnet20': (128, functools.partial(optax.sgd, momentum=0.9)),
    'fedhe_cnn9': (50, optax.adam),
    'dropout_cnn': (10, optax.sgd),
    'simple_cnn': (64, functools.partial(optax.sgd, momentum=0.9)),
    'vit_t16': (16, optax.sgd),
}
# Further nets of the library, for local steps beside PyTorch.
MORE = {
    'resnet10': (16, optax.adam),
    'resnet26': (16, optax.adam),
    'fedhe_cnn0': (50, optax.adam),
    'mlp': (32, optax.sgd),
    'vit_s8': (16, optax.sgd),
}
STEPS = 8


def local_epoch(
    name: str,
    steps: int = STEPS,
    matmul_dtype: str = 'float32',
    conv_backend: str = 'xla',
    clients: int = 1,
) -> programs.Program:
  """Local steps of FedAvg clients.

  Args:
    name: A key of `NETS` or `MORE`.
    steps: Local steps per call.
    matmul_dtype: Dtype of the operands of matrix products.
    conv_backend: Backend of the model's convolutions.
    clients: Number of clients; several are divided over all devices.

  Returns:
    The program.
  """
  batch_size, optimizer = (MORE | NETS)[name]
  federation, data = common.make_federation(
      create(
          name,
          INPUT_SHAPE,
          10,
          matmul_dtype=matmul_dtype,
          conv_backend=conv_backend,
      ),
      clients,
      batch_size * steps,
      common.local_training(optimizer, batch_size=batch_size),
  )
  task = programs.Round(fedavg(federation), federation, data, clients)
  backend = 'map' if clients == 1 else 'shard_map'
  return programs.library(task, backend, clients * batch_size * steps)


def parser(description: str, known=NETS) -> argparse.ArgumentParser:
  """The shared arguments of a command over `NETS`.

  Args:
    description: First line of help.
    known: The nets that may be named.

  Returns:
    The parser, for `parsed`.
  """
  flags = argparse.ArgumentParser(description=description)
  flags.add_argument('--models', help=f'of {", ".join(known)}; all by default')
  flags.add_argument('--quick', action='store_true', help='one small net')
  flags.add_argument('--output', help='JSON file to write')
  return flags


def parsed(
    flags: argparse.ArgumentParser, known=NETS
) -> tuple[argparse.Namespace, list[str]]:
  """The arguments (quick, output, ...), and the names of the models."""
  args = flags.parse_args()
  names = args.models.split(',') if args.models else list(known)
  if args.quick and not args.models:
    names = ['dropout_cnn']
  for name in names:
    if name not in known:
      flags.error(f'Unknown net {name!r}; known are {", ".join(known)}.')
  return args, names


def parse_args(description: str) -> tuple[argparse.Namespace, list[str]]:
  """Parses the arguments of a command over `NETS`.

  Args:
    description: First line of help.

  Returns:
    The arguments (quick, output), and the names of the models.
  """
  return parsed(parser(description))
