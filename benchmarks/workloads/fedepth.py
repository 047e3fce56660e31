"""FeDepth: two clients with one budget train PreResNet-20 in stages.

With budget 1 they are FedAvg clients. The other budgets are also compared with
epochs of the full model.
"""

import functools

import optax

from benchmarks import common, flops, naive, programs
from benchmarks.programs import Program
from benchmarks.workloads.base import (
    BACKENDS,
    ONE_CLIENT_AT_A_TIME,
    Case,
    references,
    torch_sgd,
)
from fedjax_het.algorithms import fedepth
from fedjax_het.depthwise import Stage, head_start, make_stages, pack
from fedjax_het.depthwise.memory import budget_mb, paper_costs
from fedjax_het.models import BlockModel, create

INPUT_SHAPE = (32, 32, 3)
NUM_CLIENTS = 2
NUM_STEPS = 2
LEARNING_RATE = 0.1
BUDGETS = {
    'budget_1': '1',
    'budget_1_2': '1/2',
    'budget_1_3': '1/3',
    'budget_1_6': '1/6',
}


def sgd(learning_rate):
  """FeDepth's optimizer, without weight decay."""
  return optax.sgd(learning_rate, momentum=0.9)


def stages_of(
    model: BlockModel, budget: str, batch_size: int
) -> tuple[Stage, ...]:
  """The stages of `fedepth` for a budget; a single one for '1'."""
  spans = ((0, head_start(model) - 1),)
  if budget != '1':
    costs = paper_costs(model, batch_size)
    spans = pack(costs, budget_mb(budget, costs.full))
  return make_stages(model, spans)


def _torch_inputs(model, steps, batch_size):
  from benchmarks import torch_models, torch_training

  nets = [torch_models.mirror(model) for _ in range(NUM_CLIENTS)]
  num = steps * batch_size
  return nets, torch_training.noise(NUM_CLIENTS, num, INPUT_SHAPE)


def eager(model: BlockModel, stages, batch_size: int, steps: int) -> Program:
  """One client after another."""
  from benchmarks import torch_training

  nets, data = _torch_inputs(model, steps, batch_size)
  optimizer = torch_sgd(LEARNING_RATE, momentum=0.9)

  def call():
    for net, images, labels in zip(nets, *data, strict=True):
      for stage in stages:
        loss = torch_training.StageLoss(net, stage)
        params = loss.trained()
        torch_training.train(
            loss, params, optimizer(params), images, labels, batch_size
        )

  return Program(call, NUM_CLIENTS * steps * batch_size)


def stacked(model: BlockModel, stages, batch_size: int, steps: int) -> Program:
  """All clients stacked."""
  from benchmarks import torch_training

  nets, data = _torch_inputs(model, steps, batch_size)
  losses = [torch_training.StageLoss(nets[0], stage) for stage in stages]
  optimizer = torch_sgd(LEARNING_RATE, momentum=0.9)

  def call():
    stack = torch_training.Stack(nets)
    for loss in losses:
      names = torch_training.stage_names(loss)
      stack.train(loss, optimizer, data, batch_size, names)

  return Program(call, NUM_CLIENTS * steps * batch_size)


def naive_stages(
    model: BlockModel, stages, batch_size: int, steps: int
) -> Program:
  """A single client, because it is slow."""
  args = naive.arguments(model, 1, steps, batch_size)
  client = naive.depthwise(stages, sgd(LEARNING_RATE))
  return programs.naive(client, args, steps * batch_size)


def case(name: str, scale: str) -> Case:
  """One of `BUDGETS`; `vmap` is timed only for the first."""
  batch_size = 128 if scale == 'full' else 8
  model = create(
      'preresnet20',
      INPUT_SHAPE,
      10,
      num_blocks=3 if scale == 'full' else 1,
      width=1 / 4 if scale == 'tiny' else 1.0,
  )
  budget = BUDGETS[name]
  stages = stages_of(model, budget, batch_size)

  def task():
    federation, data = common.make_federation(
        model,
        NUM_CLIENTS,
        NUM_STEPS * batch_size,
        common.local_training(sgd, LEARNING_RATE, batch_size),
    )
    share = '' if budget == '1' else budget
    federation = common.with_options(federation, budget=share)
    algorithm = fedepth(federation, plan='paper')
    return programs.Round(algorithm, federation, data, NUM_CLIENTS)

  def form(make):
    return functools.partial(make, model, stages, batch_size)

  def full_model(steps):
    program = eager(model, stages_of(model, '1', batch_size), batch_size, steps)
    return program._replace(flops=flops.training_flops(model))

  backends = BACKENDS if budget == '1' else ONE_CLIENT_AT_A_TIME
  return Case(
      task,
      NUM_CLIENTS * NUM_STEPS * batch_size,
      sum(map(flops.stage_flops, stages)),
      references(
          naive=form(naive_stages),
          eager=form(eager),
          stacked=form(stacked),
          steps=NUM_STEPS,
          naive_once=scale == 'full',
          **({} if budget == '1' else {'FedAvg': full_model}),
      ),
      backends=backends if scale == 'full' else (),
      onednn=scale != 'quick',
  )
