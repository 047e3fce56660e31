"""FedIN's local epoch in eager PyTorch: a baseline of the benchmarks."""

import torch
from torch import nn
from torch.nn import functional


class BasicBlock(nn.Module):

  def __init__(self, num_in, num_out, stride):
    super().__init__()

    def unit(num_in, kernel, stride):
      return nn.Sequential(
          nn.Conv2d(
              num_in, num_out, kernel, stride, kernel // 2, bias=False
          ),
          nn.BatchNorm2d(num_out),
      )

    self.first, self.second = unit(num_in, 3, stride), unit(num_out, 3, 1)
    self.shortcut = nn.Identity()
    if stride > 1 or num_in != num_out:
      self.shortcut = unit(num_in, 1, stride)

  def forward(self, x):
    y = self.second(functional.relu(self.first(x)))
    return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
  """FedIN's ResNet with the ImageNet stem, in three parts."""

  def __init__(self, num_blocks, num_in, num_classes, width=1.0):
    super().__init__()
    channels = [int(64 * 2**j * width) for j in range(4)]
    self.extractor = nn.Sequential(
        nn.Conv2d(num_in, channels[0], 7, 2, 3, bias=False),
        nn.BatchNorm2d(channels[0]),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    )
    blocks, last = [], channels[0]
    for stage, (features, number) in enumerate(
        zip(channels, num_blocks, strict=True)
    ):
      for b in range(number):
        blocks.append(BasicBlock(last, features, 2 if stage and not b else 1))
        last = features
    self.middle = nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    self.classifier = nn.Linear(last, num_classes)
    self.norms = [m for m in self.modules() if isinstance(m, nn.BatchNorm2d)]


def in_loss(model, pairs):
  """The IN loss on pairs (s_in, s_out); does not update running statistics."""
  for norm in model.norms:
    norm.momentum = 0.0
  loss = functional.mse_loss(model.middle(pairs[0]), pairs[1])
  for norm in model.norms:
    norm.momentum = 0.1
  return loss


def local_epoch(model, images, labels, pairs, batch_size, *, lr, mu, lam):
  """Trains for one epoch by FedIN (journal version).

  Args:
    model: A `ResNet`, changed in place.
    images: [N, C, H, W] float32.
    labels: [N] int64.
    pairs: (s_in, s_out), used in every step.
    batch_size: Examples per step.
    lr: Learning rate of Adam.
    mu: Strength of the proximal term.
    lam: lambda of the combination G_in + (lam / 2) G_loc.
  """
  model.train()
  params, middle = list(model.parameters()), list(model.middle.parameters())
  anchor = [p.detach().clone() for p in params]
  optimizer = torch.optim.Adam(params, lr=lr, fused=True)
  order = torch.randperm(len(images))
  for place in order.split(batch_size):
    s_out = model.middle(model.extractor(images[place]))
    loss = functional.cross_entropy(model.classifier(s_out), labels[place])
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
      for p, a in zip(params, anchor, strict=True):
        p.grad.add_(p - a, alpha=mu)
    g_in = torch.autograd.grad(in_loss(model, pairs), middle)
    for p, g in zip(middle, g_in, strict=True):
      p.grad.mul_(lam / 2).add_(g)
    optimizer.step()
