"""FedAvg with plain SGD on many clients with one model.

'simulation' is the simulators' CIFAR-10 benchmark (arXiv 2404.06430), 50 of
1,000 clients per round; 'many' has ten thousand small clients in one cohort.
The references are rounds with fewer clients; the naive one does not average.
"""

import functools

import optax

from benchmarks import common, flops, memory, naive, programs
from benchmarks.programs import Program
from benchmarks.workloads.base import BACKENDS, Case, references, torch_sgd
from fedjax_het.algorithms import fedavg
from fedjax_het.models import BlockModel, create

BATCH_SIZE = 10
LEARNING_RATE = 0.1


def torch_round(model: BlockModel, form: str, clients: int, steps: int):
  """A round in PyTorch; `form` is a function of `torch_training`."""
  from benchmarks import torch_models, torch_training

  net = torch_models.mirror(model)
  num = steps * BATCH_SIZE
  data = torch_training.noise(clients, num, model.input_shape)
  optimizer = torch_sgd(LEARNING_RATE)
  run = getattr(torch_training, form)
  return Program(
      lambda: run(net, data, BATCH_SIZE, optimizer), clients * num
  )


def naive_round(model: BlockModel, clients: int, steps: int) -> Program:
  """Local training only, without averaging."""
  args = naive.arguments(model, clients, steps, BATCH_SIZE)
  client = naive.whole_model(model, optax.sgd(LEARNING_RATE))
  return programs.naive(client, args, clients * steps * BATCH_SIZE)


def _case(model, population, cohort, steps, clients, **more) -> Case:
  """A round; `clients` are the numbers of the eager, stacked and naive form."""

  def task():
    federation, data = common.make_federation(
        model,
        population,
        steps * BATCH_SIZE,
        common.local_training(optax.sgd, LEARNING_RATE, BATCH_SIZE),
    )
    return programs.Round(fedavg(federation), federation, data, cohort)

  in_torch = functools.partial(torch_round, model)
  num_eager, num_stacked, num_naive = clients
  return Case(
      task,
      cohort * steps * BATCH_SIZE,
      flops.training_flops(model),
      references(
          naive=functools.partial(naive_round, model, num_naive),
          eager=functools.partial(in_torch, 'average_round', num_eager),
          stacked=functools.partial(
              in_torch, 'stacked_average_round', num_stacked
          ),
          steps=steps,
      ),
      **more,
  )


def simulation(name: str, scale: str) -> Case:
  """Clients of 50 images, one epoch of batch 10, the CNN with dropout."""
  del name
  population, cohort = dict(full=(1000, 50), quick=(60, 3), tiny=(20, 4))[
      scale
  ]
  width = 1 / 16 if scale == 'tiny' else 1.0
  return _case(
      create('dropout_cnn', (32, 32, 3), 10, width=width),
      population,
      cohort,
      5,
      (cohort, min(cohort, 10), 10 if scale == 'full' else 2),
      backends=BACKENDS if scale == 'full' else (),
  )


def many(name: str, scale: str) -> Case:
  """Clients with 20 images and a dense model, all in every round."""
  del name
  number = dict(full=10_000, quick=1_000, tiny=20)[scale]
  return _case(
      create('mlp', memory.INPUT_SHAPE, 10, **memory.OPTIONS),
      number,
      number,
      memory.IMAGES // BATCH_SIZE,
      (number // 10, min(number, 100), min(number, 100)),
      backends=() if scale == 'quick' else BACKENDS,
      onednn=False,
      cohorts=(10, number),
  )
