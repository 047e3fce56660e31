"""FedAUX for dense nets with norms in NumPy, written from the paper.

Nets, local training and the student's steps are those of `feddf_numpy`.
"""

import numpy as np

from tests.algorithms import feddf_numpy


def features(net, names, x):
  """Inputs of the last layer in eval mode."""
  p, s = net
  for name in names[:-1]:
    x = x @ p[name, 'kernel']
    mean, var = s[name]
    x = p[name, 'scale'] * (x - mean) / np.sqrt(var + 1e-5) + p[name, 'bias']
    x = np.maximum(x, 0)
  return x


def regression(own, other, l2, intercept=True, steps=4000):
  """w and b by gradient descent; rows of norm 1 at most."""
  x = np.concatenate([own, other])
  t = np.concatenate([np.ones(len(own)), -np.ones(len(other))])
  w, b = np.zeros(x.shape[1]), 0.0
  rate = 1 / (0.5 + l2)
  for _ in range(steps):
    # The derivative of log(1 + exp(-m)) is -1 / (1 + exp(m)).
    slope = -t / (1 + np.exp(t * (x @ w + b))) / len(x)
    w = w - rate * (slope @ x + l2 * w)
    b -= rate * slope.sum() * intercept
  return w, b


def fitted(net, names, own, negatives, l2, intercept=True):
  """w, b and the norm by which features are divided."""
  mine, other = (features(net, names, x) for x in (own, negatives))
  norm = np.sqrt((np.concatenate([mine, other]) ** 2).sum(axis=1)).max()
  return *regression(mine / norm, other / norm, l2, intercept), norm


def scores(net, names, own, negatives, distilled, l2):
  """s_k of one client, without noise."""
  w, b, norm = fitted(net, names, own, negatives, l2)
  z = features(net, names, distilled) / norm @ w + b
  return 1 / (1 + np.exp(-z)) + 1e-8


def one_round(nets, blocks, clients, s, distilled, batches, **settings):
  """A round in which every client takes part, with plain averages.

  Args:
    nets: {architecture: net}.
    blocks: {architecture: names of its blocks}.
    clients: (architecture, x [B, D], y [B]) of each client.
    s: [K, P], the clients' scores.
    distilled: [P, D], D_distill.
    batches: Positions of each of its minibatches.
    **settings: lr and steps of the clients, distill_lr of the server.

  Returns:
    {architecture: net} and the losses of all steps.
  """
  ends = [
      feddf_numpy.local_training(
          nets[arch], blocks[arch], x, y, settings['lr'], settings['steps']
      )
      for arch, x, y in clients
  ]
  top, bottom = 0, 0
  for k, (arch, _, _) in enumerate(clients):
    rows = feddf_numpy.logits(*ends[k], distilled, blocks[arch], False)[0]
    top, bottom = top + s[k][:, None] * rows, bottom + s[k][:, None]
  new, losses = {}, []
  for arch in nets:
    mine = [
        end for end, client in zip(ends, clients, strict=True)
        if client[0] == arch
    ]  # fmt: skip
    p = {
        path: np.mean([p[path] for p, _ in mine], axis=0)
        for path in nets[arch][0]
    }
    stats = {
        name: tuple(np.mean([s[name][i] for _, s in mine], axis=0)
                    for i in (0, 1))
        for name in nets[arch][1]
    }  # fmt: skip
    new[arch], found, _ = feddf_numpy.distil(
        (p, stats), blocks[arch], distilled, top / bottom, batches,
        settings['distill_lr'],
    )  # fmt: skip
    losses += found
  return new, losses
