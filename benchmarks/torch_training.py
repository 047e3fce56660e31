"""Local training in PyTorch, in two forms.

Eager: one client after another, as in the papers' code (`torch_local`).
Stacked: all clients of an architecture, by `torch.func.vmap` of `grad` of
`functional_call` over stacked parameters. An optimizer then steps on the
stacked leaves, which equals one step per client.

Losses are modules that contain the model `net`; both forms use the same ones.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from benchmarks import torch_fedin
from benchmarks.torch_local import (
    CrossEntropy,
    Data,
    Optimizer,
    average_round,
    train,
)
from benchmarks.torch_models import adapt
from fedjax_het.depthwise import Stage

__all__ = [
    'CrossEntropy',
    'Data',
    'FedInLocal',
    'FedInPairs',
    'LogitLoss',
    'Stack',
    'StageLoss',
    'average_round',
    'batches',
    'fedin_epoch',
    'noise',
    'stacked_average_round',
    'stage_names',
    'train',
]


class LogitLoss(CrossEntropy):
  """FedHe's loss: cross-entropy plus distance to class means of logits."""

  def __init__(self, net: nn.Module, means: torch.Tensor):
    super().__init__(net)
    self.means = means

  def forward(self, x, y):
    logits = self.net(x)
    error = torch.mean((logits - self.means[y]) ** 2)
    return functional.cross_entropy(logits, y) + error


class StageLoss(CrossEntropy):
  """FeDepth's loss: frozen blocks, trained blocks, the skip, the head."""

  def __init__(self, net: nn.Sequential, stage: Stage):
    super().__init__(net)
    self.stage = stage

  def forward(self, x, y):
    stage = self.stage
    with torch.no_grad():
      for i in stage.frozen:
        x = self.net[i](x)
    for i in stage.trained:
      x = self.net[i](x)
    x = adapt(x, stage.head_shape)
    for i in range(stage.head, len(self.net)):
      x = self.net[i](x)
    return functional.cross_entropy(x, y)

  def trained(self) -> list[nn.Parameter]:
    """Parameters of the stage's blocks and of the head."""
    blocks = [getattr(self.net, name) for name in self.stage.names]
    return [p for block in blocks for p in block.parameters()]


def stage_names(loss: StageLoss) -> list[str]:
  """Names in a `Stack` of the parameters that a stage trains."""
  mine = {id(p) for p in loss.trained()}
  return [name for name, p in loss.named_parameters() if id(p) in mine]


class FedInLocal(CrossEntropy):
  """The cross-entropy of FedIN's model in three parts."""

  def forward(self, x, y):
    net = self.net
    logits = net.classifier(net.middle(net.extractor(x)))
    return functional.cross_entropy(logits, y)


class FedInPairs(CrossEntropy):
  """The IN loss."""

  def forward(self, s_in, s_out):
    return torch_fedin.in_loss(self.net, (s_in, s_out))


def noise(num_clients: int, num: int, input_shape) -> Data:
  """Clients of `num` random images of (height, width, channels) each."""
  height, width, channels = input_shape
  shape = (num_clients, num, channels, height, width)
  return Data(torch.randn(shape), torch.randint(0, 10, shape[:2]))


class Stack:
  """Several models of one architecture, with stacked parameters.

  Attributes:
    params: {name: [K, ...]}, changed in place.
    buffers: {name: [K, ...]}, changed in place.
  """

  def __init__(self, nets: Sequence[nn.Module]):
    params, self.buffers = stack_module_state([CrossEntropy(n) for n in nets])
    self.params = {name: leaf.detach() for name, leaf in params.items()}

  def gradient(self, loss: nn.Module, names: Sequence[str], *batch):
    """Gradients of all clients with respect to some parameters.

    Args:
      loss: Loss of one model; its own parameters are not used.
      names: Names of these parameters.
      *batch: Arguments of the loss, [K, ...] each.

    Returns:
      {name: [K, ...]}.
    """

    def one(trained, rest, buffers, *batch):
      return functional_call(loss, (trained, rest, buffers), batch)

    trained = {name: self.params[name] for name in names}
    rest = {n: p for n, p in self.params.items() if n not in trained}
    return vmap(grad(one), randomness='different')(
        trained, rest, self.buffers, *batch
    )

  def step(self, optimizer: torch.optim.Optimizer, grads) -> None:
    """Takes an optimizer step with gradients of some parameters."""
    for name, gradient in grads.items():
      self.params[name].grad = gradient
    optimizer.step()

  def train(
      self,
      loss: nn.Module,
      optimizer: Optimizer,
      data: Data,
      batch_size: int,
      names: Sequence[str] | None = None,
  ) -> None:
    """One epoch of all clients.

    Args:
      loss: Maps a batch of one client to a scalar.
      optimizer: Makes an optimizer for parameters.
      data: The clients' examples.
      batch_size: Examples per step.
      names: Names of the parameters to train; None for all.
    """
    names = list(self.params) if names is None else names
    stepper = optimizer([self.params[name] for name in names])
    for batch in batches(data, batch_size):
      self.step(stepper, self.gradient(loss, names, *batch))


def batches(data: Data, batch_size: int) -> Iterator[Data]:
  """Minibatches of all clients in shuffled order, leaves [K, B, ...]."""
  order = torch.argsort(torch.rand(data.labels.shape), dim=1)
  client = torch.arange(len(order))[:, None]
  for place in order.split(batch_size, dim=1):
    yield Data(*(leaf[client, place] for leaf in data))


def fedin_epoch(
    nets: Sequence[torch_fedin.ResNet],
    data: Data,
    pairs: tuple[torch.Tensor, torch.Tensor],
    batch_size: int,
    *,
    lr: float,
    mu: float,
    lam: float,
) -> Stack:
  """FedIN's local epoch of stacked clients; see `torch_fedin.local_epoch`.

  Args:
    nets: One model per client.
    data: The clients' examples.
    pairs: (s_in, s_out), leaves [K, B, ...], used in every step.
    batch_size: Examples per step.
    lr: Learning rate of Adam.
    mu: Strength of the proximal term.
    lam: lambda of the combination G_in + (lam / 2) G_loc.

  Returns:
    The trained models.
  """
  stack = Stack(nets)
  local, inner = FedInLocal(nets[0]), FedInPairs(nets[0])
  names = list(stack.params)
  middle = [name for name in names if name.startswith('net.middle.')]
  anchor = {name: leaf.clone() for name, leaf in stack.params.items()}
  stepper = torch.optim.Adam(stack.params.values(), lr=lr, fused=True)
  for batch in batches(data, batch_size):
    grads = stack.gradient(local, names, *batch)
    for name, g in grads.items():
      g.add_(stack.params[name] - anchor[name], alpha=mu)
    for name, g in stack.gradient(inner, middle, *pairs).items():
      grads[name].mul_(lam / 2).add_(g)
    stack.step(stepper, grads)
  return stack


def stacked_average_round(
    net: nn.Module, data: Data, batch_size: int, optimizer: Optimizer
) -> None:
  """`average_round` with all clients stacked."""
  stack = Stack([net] * len(data.images))
  loss = CrossEntropy(net)
  stack.train(loss, optimizer, data, batch_size)
  with torch.no_grad():
    for name, p in loss.named_parameters():
      p.copy_(stack.params[name].mean(0))
