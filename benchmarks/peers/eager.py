"""Eager PyTorch, one client after another: a program of `rows.programs`.

It has FedAvg, local training, FD with its class means, and InCo's layer-wise
mean without the correction of deep layers.
"""

from collections.abc import Callable
import random

import torch
from torch.nn import functional

from benchmarks import torch_local
from benchmarks.peers import meter, torch_nets


def _fit(task, loss, optimizer, part) -> None:
  torch_local.train(
      loss,
      list(loss.parameters()),
      optimizer,
      *part,
      task.local['batch_size'],
      task.local['epochs'],
  )


def averaging(task, parts) -> Callable[[], None]:
  """FedAvg with one model."""
  (net,) = torch_nets.nets(task)

  def run_round():
    cohort = random.sample(parts, task.cohort)
    torch_local.average_round(
        net,
        torch_local.Data(*zip(*cohort, strict=True)),
        task.local['batch_size'],
        lambda params: torch_nets.optimizer(task, params),
        task.local['epochs'],
    )

  return run_round


def own_nets(task) -> list[torch.nn.Sequential]:
  """One network per client; each architecture has equally many clients."""
  return [
      net
      for _ in range(task.clients // len(task.models))
      for net in torch_nets.nets(task)
  ]


class FdLoss(torch_local.CrossEntropy):
  """Cross-entropy plus distillation towards other clients' class means.

  Attributes:
    goal: [C, C], the mean softmax output of the others by class.
    known: [C], 1 for classes that others have sent, else 0.
    sums: [C, C], sums of this visit's outputs by class.
    counts: [C], numbers of these outputs.
  """

  def __init__(self, net, num_classes: int):
    super().__init__(net)
    self.goal = torch.zeros(num_classes, num_classes)
    self.known = torch.zeros(num_classes)
    self.begin()

  def begin(self) -> None:
    """Begins a visit."""
    self.sums = torch.zeros_like(self.goal)
    self.counts = torch.zeros_like(self.known)

  def forward(self, x, y):
    logits = self.net(x)
    log_p = functional.log_softmax(logits, 1)
    with torch.no_grad():
      self.sums.index_add_(0, y, log_p.exp())
      self.counts.index_add_(0, y, torch.ones(len(y)))
    psi = -(self.goal[y] * log_p).sum(1) * self.known[y]
    return functional.nll_loss(log_p, y) + psi.mean()


def exchange_means(losses: list[FdLoss]) -> None:
  """Gives each client the mean of the other clients' class means."""
  present = torch.stack([loss.counts > 0 for loss in losses]).float()
  means = torch.stack([
      loss.sums / loss.counts.clamp(min=1)[:, None] for loss in losses
  ])
  for mine, own, loss in zip(means, present, losses, strict=True):
    others = present.sum(0) - own
    loss.goal = (means.sum(0) - mine) / others.clamp(min=1)[:, None]
    loss.known = (others > 0).float()


def local(task, parts) -> Callable[[], None]:
  """Local training, or FD; clients keep models and optimizers."""
  distil = task.algorithm == 'fd'
  make = (lambda net: FdLoss(net, 10)) if distil else torch_local.CrossEntropy
  losses = [make(net) for net in own_nets(task)]
  optimizers = [torch_nets.optimizer(task, x.parameters()) for x in losses]

  def run_round():
    for loss, optimizer, part in zip(losses, optimizers, parts, strict=True):
      if distil:
        loss.begin()
      _fit(task, loss, optimizer, part)
    if distil:
      exchange_means(losses)

  return run_round


def shared_names(net, blocks: list[int]) -> dict[str, torch.nn.Parameter]:
  """Parameters by stem, stage and block of the stage, or head.

  Args:
    net: A ResNet from `torch_nets.make`.
    blocks: Blocks of each stage.

  Returns:
    {name: parameter}; nets of other depths use the same names.
  """
  _, extractor, middle, classifier = net
  places = [(s, b) for s, number in enumerate(blocks) for b in range(number)]
  parts = {'stem': extractor, 'head': classifier}
  # The global mean after the blocks has no parameters.
  for (stage, b), block in zip(places, middle, strict=False):
    parts[f'stage{stage}_block{b}'] = block
  return {
      f'{name}.{path}': p
      for name, part in parts.items()
      for path, p in part.named_parameters()
  }


def layerwise(task, parts) -> Callable[[], None]:
  """Averages each layer over the clients that hold it."""
  nets = own_nets(task)
  depths = [layers[0][1] for layers in task.layers]
  named = [
      shared_names(net, depths[i % len(depths)]) for i, net in enumerate(nets)
  ]
  owners: dict[str, list[torch.nn.Parameter]] = {}
  for each in named:
    for name, p in each.items():
      owners.setdefault(name, []).append(p)

  def run_round():
    for net, part in zip(nets, parts, strict=True):
      optimizer = torch_nets.optimizer(task, net.parameters())
      _fit(task, torch_local.CrossEntropy(net), optimizer, part)
    with torch.no_grad():
      for params in owners.values():
        mean = sum(params) / len(params)
        for p in params:
          p.copy_(mean)

  return run_round


ROUNDS = {
    'fedavg': averaging,
    'private': local,
    'fd': local,
    'incoavg': layerwise,
}


def main() -> None:
  task = meter.this_task()
  run_round = ROUNDS[task.algorithm](task, torch_nets.clients(task.path))
  numbers = map(torch_nets.count, torch_nets.nets(task))
  clock, before, enough = meter.Meter(task, sum(numbers)), 0, False
  while not enough:
    run_round()
    enough = clock.round(torch_nets.Inputs.images - before)
    before = torch_nets.Inputs.images


if __name__ == '__main__':
  main()
