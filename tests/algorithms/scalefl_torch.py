"""A round of ScaleFL in PyTorch, written from the paper."""

import numpy as np
import torch
import torch.nn.functional as F

BLOCKS = ('stage1_block0', 'stage2_block0')
STRIDES = (1, 2)


def entries(path, leaf, rate):
  """Slices that keep leading channels, but all classes and image channels."""
  head = path[0] in ('exit1', 'head')
  keep = [slice(None)] * leaf.ndim
  if not head:
    keep[-1] = slice(int(rate * leaf.shape[-1]))
  if path[-1] == 'kernel' and path[0] != 'stem':
    keep[-2] = slice(int(rate * leaf.shape[-2]))
  return tuple(keep)


def forward(p, x, rate, cut):
  """Logits of the exits after each of the first `cut` blocks, in order."""

  def conv(x, name, stride=1):
    kernel = p[(*name, 'kernel')].permute(3, 2, 0, 1)
    return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

  def norm(x, name, rate):
    x = x / rate
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
    scale, bias = (p[(*name, n)][:, None, None] for n in ('scale', 'bias'))
    return (x - mean) / torch.sqrt(var + 1e-5) * scale + bias

  def head(x, name):
    return x.mean(dim=(2, 3)) @ p[(name, 'kernel')] + p[(name, 'bias')]

  x = norm(conv(x, ('stem', 'conv')), ('stem', 'norm'), rate).relu()
  logits = []
  for j, (block, stride) in enumerate(zip(BLOCKS[:cut], STRIDES), 1):
    y = conv(x, (block, 'conv1'), stride)
    y = norm(y, (block, 'norm1'), rate).relu()
    y = norm(conv(y, (block, 'conv2')), (block, 'norm2'), rate)
    if stride == 2:
      x = conv(x, (block, 'conv_shortcut'), stride)
      x = norm(x, (block, 'norm_shortcut'), 1.0)
    x = (x + y).relu()
    if j == 2:
      logits.append(head(x, 'head'))
    else:
      z = x
      for i in (1, 2, 3):
        name = f'exit1/conv{i}'
        z = norm(conv(z, (name, 'conv')), (name, 'norm'), rate).relu()
      logits.append(head(z, 'exit1'))
  return logits


def exits_loss(logits, y, gamma, temperature):
  n, total = len(logits), 0.0
  teacher = logits[-1].detach()
  for j, z in enumerate(logits, 1):
    total = total + j * F.cross_entropy(z, y)
    if j < n:
      log_q = F.log_softmax(teacher / temperature, 1)
      log_p = F.log_softmax(z / temperature, 1)
      kd = (log_q.exp() * (log_q - log_p)).mean()
      total = total + j * gamma * temperature**2 * kd
  return total * 2 / (n * (n + 1))


def one_round(theta, clients, gamma, temperature, rate_of_descent, steps):
  """{path: array} after a round of (level, x [B, H, W, 1], y) clients."""
  sums = {path: np.zeros_like(leaf) for path, leaf in theta.items()}
  counts = {path: np.zeros_like(leaf) for path, leaf in theta.items()}
  for (rate, cut), x, y in clients:
    mine = {
        path: entries(path, leaf, rate)
        for path, leaf in theta.items()
        if cut == 2 or path[0] not in ('stage2_block0', 'head')
    }
    p = {
        path: torch.tensor(theta[path][keep], requires_grad=True)
        for path, keep in mine.items()
    }
    x, y = torch.tensor(x).permute(0, 3, 1, 2), torch.tensor(y)
    for _ in range(steps):
      logits = forward(p, x, rate, cut)
      loss = exits_loss(logits, y, gamma, temperature)
      grads = torch.autograd.grad(loss, list(p.values()))
      with torch.no_grad():
        for leaf, grad in zip(p.values(), grads, strict=True):
          leaf -= rate_of_descent * grad
    for path, keep in mine.items():
      sums[path][keep] += p[path].detach().numpy() - theta[path][keep]
      counts[path][keep] += 1
  return {
      path: leaf + sums[path] / np.maximum(counts[path], 1)
      for path, leaf in theta.items()
  }
