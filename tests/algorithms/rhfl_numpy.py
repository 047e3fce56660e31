"""Rounds of RHFL for dense nets with norms in NumPy, written from the paper.

A net is (parameters {path: array}, running statistics {block: (mean, var)}).
All examples of a client, and all public ones, are one minibatch each.
"""

import numpy as np

from tests.algorithms.scalefl_numpy import gradient


def logits(net, names, x, train):
  """[B, C] outputs, and the running statistics behind them."""
  p, s = net
  after = {}
  for name in names[:-1]:
    x = x @ p[name, 'Dense_0', 'kernel'] + p[name, 'Dense_0', 'bias']
    mean, var = s[name]
    if train:
      mean = x.mean(axis=0)
      var = ((x - mean) ** 2).mean(axis=0)
      after[name] = tuple(
          0.9 * old + 0.1 * new
          for old, new in zip(s[name], (mean, var), strict=True)
      )
    x = (x - mean) / np.sqrt(var + 1e-5)
    x = x * p[name, 'BatchNorm_0', 'scale'] + p[name, 'BatchNorm_0', 'bias']
    x = np.where(x.real > 0, x, 0)
  last = names[-1]
  return x @ p[last, 'Dense_0', 'kernel'] + p[last, 'Dense_0', 'bias'], after


def softmax(z):
  e = np.exp(z)
  return e / e.sum(axis=1, keepdims=True)


def symmetric_cross_entropy(z, y, a, b):
  """The mean over a batch of a CE + b RCE."""
  p = softmax(z)
  y = np.eye(z.shape[1])[y]
  ce = -np.sum(y * np.log(p), axis=1)
  p = np.where(p.real < 1e-7, 1e-7, p)
  rce = -np.sum(p * np.log(np.clip(y, 1e-4, 1)), axis=1)
  return np.mean(a * ce + b * rce)


def step(net, names, x, loss_of, lr):
  """A step of gradient descent on a loss of the logits, in training mode."""
  p, s = net

  def loss(p):
    return loss_of(logits((p, s), names, x, True)[0])

  grads, (_, stats) = gradient(loss, p), logits(net, names, x, True)
  return ({k: v - lr * grads[k] for k, v in p.items()}, stats), loss(p)


def weights_of(before, now, eta):
  """W of a round; `before` is None in the first one."""
  num = len(now)
  if before is None:
    return np.full(num, 1 / (num - 1))
  quality = [1 / loss for loss in now]
  speed = [old - new for old, new in zip(before, now, strict=True)]
  confidence = np.array(quality) * np.array(speed)
  e = np.exp(1 / (num - 1) + eta * confidence / confidence.sum())
  return e / e.sum()


def run(
    nets, clients, public, *, num_rounds, pretrain, epochs, lr, eta, a, b
):
  """Pre-training and rounds in which every client takes part.

  Args:
    nets: One net per client.
    clients: (names of blocks, x [n, D], y [n]) of each client.
    public: [P, D].
    num_rounds: Rounds.
    pretrain: Steps before the first round.
    epochs: Local steps of a round.
    lr: Learning rate.
    eta: Strength of the confidence.
    a: Coefficient of CE.
    b: Coefficient of RCE.

  Returns:
    The nets; for each round W and, of each client, its loss on the public set,
    less the smallest possible one, and the mean of its local losses.
  """
  nets, before, told = list(nets), None, []

  def train(k, steps):
    names, x, y = clients[k]
    found = []
    for _ in range(steps):
      nets[k], loss = step(
          nets[k], names, x,
          lambda z: symmetric_cross_entropy(z, y, a, b), lr,
      )  # fmt: skip
      found.append(loss)
    return np.mean(found)

  for k in range(len(clients)):
    train(k, pretrain)
  for _ in range(num_rounds):
    now = [
        symmetric_cross_entropy(logits(net, names, x, False)[0], y, a, b)
        for net, (names, x, y) in zip(nets, clients, strict=True)
    ]
    weights = weights_of(before, now, eta)
    taught = [
        softmax(logits(net, names, public, False)[0])
        for net, (names, _, _) in zip(nets, clients, strict=True)
    ]
    divergences, losses = [], []
    for k, (names, _, _) in enumerate(clients):

      def collaborate(z, k=k, weights=weights, taught=taught):
        log_p = np.log(softmax(z))
        return sum(
            weights[i] * np.mean(np.sum(p * (np.log(p) - log_p), axis=1))
            for i, p in enumerate(taught)
            if i != k
        )

      nets[k], loss = step(nets[k], names, public, collaborate, lr)
      # The smallest loss that any outputs have, that of the mean teacher.
      others = [i for i in range(len(clients)) if i != k]
      mean = sum(weights[i] * taught[i] for i in others)
      divergences.append(loss - collaborate(np.log(mean)))
    for k in range(len(clients)):
      losses.append(train(k, epochs))
    told.append((weights, divergences, losses))
    before = now
  return nets, told
