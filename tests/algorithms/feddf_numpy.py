"""A round of FedDF for dense nets with norms in NumPy, written from the paper.

A net is (parameters {path: array}, running statistics {block: (mean, var)}).
Its blocks are dense layers without bias, each with a norm and a ReLU, and a
last dense layer with bias.
"""

import numpy as np

from tests.algorithms.scalefl_numpy import gradient


def logits(p, s, x, names, train):
  """[B, C] outputs, and the running statistics behind them."""
  after = dict(s)
  for name in names[:-1]:
    x = x @ p[name, 'kernel']
    mean, var = s[name]
    if train:
      mean = x.mean(axis=0)
      var = ((x - mean) ** 2).mean(axis=0)
      after[name] = tuple(
          0.9 * old + 0.1 * new
          for old, new in zip(s[name], (mean, var), strict=True)
      )
    x = (x - mean) / np.sqrt(var + 1e-5)
    x = x * p[name, 'scale'] + p[name, 'bias']
    x = np.where(x.real > 0, x, 0)
  return x @ p[names[-1], 'kernel'] + p[names[-1], 'bias'], after


def log_softmax(z):
  return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def local_training(net, names, x, y, lr, steps):
  """SGD on the cross-entropy of all examples at once."""
  p, s = net
  for _ in range(steps):

    def loss(p, s=s):
      rows = log_softmax(logits(p, s, x, names, True)[0])
      return -np.mean(rows[np.arange(len(y)), y])

    grads = gradient(loss, p)
    _, s = logits(p, s, x, names, True)
    p = {path: leaf - lr * grads[path] for path, leaf in p.items()}
  return p, s


def distil(net, names, x, teacher, batches, lr):
  """Adam on KL(teacher || student) over minibatches of the public examples.

  Returns the net, the losses and the norms of the gradients.
  """
  p, s = net
  m, v = ({path: np.zeros_like(leaf) for path, leaf in p.items()}
          for _ in range(2))  # fmt: skip
  losses, norms = [], []
  for j, batch in enumerate(batches):
    log_t = log_softmax(teacher[batch])

    def loss(p, s=s, batch=batch, log_t=log_t):
      log_q = log_softmax(logits(p, s, x[batch], names, True)[0])
      return np.mean(np.sum(np.exp(log_t) * (log_t - log_q), axis=1))

    grads = gradient(loss, p)
    losses.append(loss(p))
    _, s = logits(p, s, x[batch], names, True)
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    norms.append(norm)
    rate = lr * (1 + np.cos(np.pi * j / len(batches))) / 2
    for path, g in grads.items():
      g = g * min(1, 5 / norm)
      m[path] = 0.9 * m[path] + 0.1 * g
      v[path] = 0.999 * v[path] + 0.001 * g**2
      step = m[path] / (1 - 0.9 ** (j + 1))
      size = np.sqrt(v[path] / (1 - 0.999 ** (j + 1)))
      p = {**p, path: p[path] - rate * step / (size + 1e-8)}
  return (p, s), losses, norms


def one_round(nets, blocks, clients, public, batches, lr, steps, distill_lr):
  """A round in which every client takes part.

  Args:
    nets: {architecture: net}.
    blocks: {architecture: names of its blocks}.
    clients: (architecture, x [B, D], y [B]) of each client.
    public: [P, D].
    batches: Positions of each minibatch of the public examples.
    lr: The clients' learning rate.
    steps: Their local steps.
    distill_lr: The server's learning rate.

  Returns:
    {architecture: net}, its losses and gradient norms, over all steps.
  """
  ends = [
      local_training(nets[arch], blocks[arch], x, y, lr, steps)
      for arch, x, y in clients
  ]
  outputs = [
      logits(*end, public, blocks[arch], False)[0]
      for end, (arch, _, _) in zip(ends, clients, strict=True)
  ]
  teacher = sum(outputs) / len(outputs)
  new, losses, norms = {}, [], []
  for arch in nets:
    mine = [
        (len(y), *end)
        for end, (other, _, y) in zip(ends, clients, strict=True)
        if other == arch
    ]
    total = sum(n for n, _, _ in mine)
    p = {
        path: sum(n * p[path] for n, p, _ in mine) / total
        for path in nets[arch][0]
    }
    s = {
        name: tuple(
            sum(n * s[name][i] for n, _, s in mine) / total for i in (0, 1)
        )
        for name in nets[arch][1]
    }
    new[arch], *found = distil(
        (p, s), blocks[arch], public, teacher, batches, distill_lr
    )
    losses += found[0]
    norms += found[1]
  return new, losses, norms
