"""FedHe: one client per CNN, ten CNNs, three minibatches of 50.

The references omit the sums of logits by class. Clients keep their optimizer
state, except in the stacked and the naive form. The naive form takes minutes at
full size, where it runs a single step.
"""

import functools

import jax.numpy as jnp
import optax

from benchmarks import common, flops, naive, programs
from benchmarks.programs import Program
from benchmarks.workloads.base import BACKENDS, Case, references, torch_adam
from fedjax_het.algorithms import fedhe
from fedjax_het.models import create

INPUT_SHAPE = (28, 28, 1)
NUM_STEPS = 3
CASES = ('ten_cnns',)


def _torch_inputs(models, steps, batch_size):
  """One loss per model, and one client's data for all."""
  import torch

  from benchmarks import torch_models, torch_training

  means = torch.zeros(10, 10)
  nets = map(torch_models.mirror, models)
  losses = [torch_training.LogitLoss(net, means) for net in nets]
  return losses, torch_training.noise(1, steps * batch_size, INPUT_SHAPE)


def eager(models, batch_size: int, steps: int) -> Program:
  """One client after another."""
  from benchmarks import torch_training

  losses, data = _torch_inputs(models, steps, batch_size)
  clients = [(loss, list(loss.parameters())) for loss in losses]
  clients = [(loss, params, torch_adam(params)) for loss, params in clients]

  def call():
    for client in clients:
      torch_training.train(
          *client, data.images[0], data.labels[0], batch_size
      )

  return Program(call, len(models) * steps * batch_size)


def stacked(models, batch_size: int, steps: int) -> Program:
  """Stacks of one client each, because all models differ."""
  from benchmarks import torch_training

  losses, data = _torch_inputs(models, steps, batch_size)

  def call():
    for loss in losses:
      stack = torch_training.Stack([loss.net])
      stack.train(loss, torch_adam, data, batch_size)

  return Program(call, len(models) * steps * batch_size)


def naive_visits(models, batch_size: int, steps: int) -> Program:
  """One program per client."""
  tx, means = optax.adam(common.LEARNING_RATE), jnp.zeros((10, 10))
  clients = [
      (
          naive.class_logits(model, tx, means),
          naive.arguments(model, 1, steps, batch_size),
      )
      for model in models
  ]
  return programs.together(clients, len(models) * steps * batch_size)


def case(name: str, scale: str) -> Case:
  """A round of all clients: ten, one in a quick run, two in tests."""
  del name
  batch_size = 50 if scale == 'full' else 10
  width = dict(full=1.0, quick=1 / 8, tiny=1 / 64)[scale]
  numbers = dict(full=range(10), quick=[0], tiny=[0, 5])[scale]
  models = [
      create(f'fedhe_cnn{i}', INPUT_SHAPE, 10, width=width) for i in numbers
  ]

  def task():
    federation, data = common.make_federation(
        models,
        len(models),
        NUM_STEPS * batch_size,
        common.local_training(batch_size=batch_size, steps=NUM_STEPS),
    )
    return programs.Round(fedhe(federation), federation, data, len(models))

  def form(make):
    return functools.partial(make, models, batch_size)

  return Case(
      task,
      len(models) * NUM_STEPS * batch_size,
      sum(map(flops.training_flops, models)) / len(models),
      references(
          naive=form(naive_visits),
          eager=form(eager),
          stacked=form(stacked),
          steps=NUM_STEPS,
          naive_once=scale == 'full',
          naive_steps=1 if scale == 'full' else 2,
      ),
      backends=BACKENDS if scale == 'full' else (),
      onednn=scale != 'quick',
  )
