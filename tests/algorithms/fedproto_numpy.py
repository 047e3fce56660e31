"""Rounds of FedProto for dense nets in NumPy, written from the paper.

As in its authors' code, the second term is the mean squared error of single
embeddings. A net is a list of (kernel, bias); all layers but the last are
followed by ReLU. A client takes one step on all of its examples in each epoch.
"""

import numpy as np


def features(net, x):
  """Inputs of all layers; the last is the embedding."""
  found = [x]
  for kernel, bias in net[:-1]:
    x = np.maximum(x @ kernel + bias, 0)
    found.append(x)
  return found


def gradient(net, x, y, known, lam):
  """Gradient of Eq. 7 by the chain rule, and the two terms of the loss.

  `known` maps a class to its global prototype.
  """
  inputs, num = features(net, x), len(y)
  z = inputs[-1] @ net[-1][0] + net[-1][1]
  p = np.exp(z - z.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  cross_entropy = -np.mean(np.log(p[range(num), y]))
  goal = np.stack([known.get(j, h) for j, h in zip(y, inputs[-1])])
  away = np.mean((inputs[-1] - goal) ** 2)
  p[range(num), y] -= 1
  delta = p / num
  grads = []
  for i in reversed(range(len(net))):
    grads.append((inputs[i].T @ delta, delta.sum(axis=0)))
    delta = delta @ net[i][0].T
    if i == len(net) - 1:
      delta = delta + lam * 2 * (inputs[-1] - goal) / goal.size
    delta = delta * (inputs[i] > 0)
  return grads[::-1], cross_entropy, away


def local_update(net, x, y, known, lam, lr, epochs):
  """The new net, prototypes {class: (mean, number)}, and the mean losses."""
  losses = []
  for _ in range(epochs):
    h = features(net, x)[-1]
    mine = {j: (h[y == j].mean(axis=0), np.sum(y == j)) for j in set(y)}
    grads, *terms = gradient(net, x, y, known, lam)
    net = [
        (kernel - lr * dk, bias - lr * db)
        for (kernel, bias), (dk, db) in zip(net, grads)
    ]
    losses.append(terms)
  return net, mine, np.mean(losses, axis=0)


def aggregate(prototypes, by_examples):
  """{class: global prototype} of a list of clients' prototypes."""
  found = {}
  for j in set().union(*prototypes):
    owners = [one[j] for one in prototypes if j in one]
    shares = np.array([n if by_examples else 1 for _, n in owners], float)
    shares /= shares.sum()
    found[j] = sum(s * mean for s, (mean, _) in zip(shares, owners))
  return found


def predict(net, x, known):
  """The class of the nearest prototype."""
  h, names = features(net, x)[-1], sorted(known)
  gaps = [np.linalg.norm(h - known[j], axis=1) for j in names]
  return np.array(names)[np.argmin(gaps, axis=0)]


def run(nets, data, num_rounds, by_examples, **training):
  """Nets, prototypes and global prototypes, and losses [rounds, clients, 2]."""
  known, all_losses = {}, []
  for _ in range(num_rounds):
    done = [
        local_update(net, x, y, known, **training)
        for net, (x, y) in zip(nets, data)
    ]
    nets, mine, losses = (list(part) for part in zip(*done))
    known = aggregate(mine, by_examples)
    all_losses.append(losses)
  return nets, mine, known, np.array(all_losses)
