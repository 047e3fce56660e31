"""Rounds of FedH2L for dense nets with norms in NumPy, written from the paper.

Minibatches are whole: a step sees all examples of a client and all seeds of the
others. A net is (parameters {path: array}, running statistics {block: (mean,
var)}); each block is a dense layer, a norm and a ReLU, and the last block is a
dense layer alone.
"""

import numpy as np

from tests.algorithms.scalefl_numpy import gradient


def logits(p, s, x, names, train):
  """[B, C] outputs, and the running statistics behind them."""
  x, after = x.reshape(len(x), -1), dict(s)
  for name in names[:-1]:
    x = x @ p[name, 'kernel'] + p[name, 'bias']
    mean, var = s[name]
    if train:
      mean = x.mean(axis=0)
      var = ((x - mean) ** 2).mean(axis=0)
      after[name] = tuple(
          0.9 * old + 0.1 * new
          for old, new in zip(s[name], (mean, var), strict=True)
      )
    x = (x - mean) / np.sqrt(var + 1e-5)
    x = x * p[name, 'scale'] + p[name, 'shift']
    x = np.where(x.real > 0, x, 0)
  return x @ p[names[-1], 'kernel'] + p[names[-1], 'bias'], after


def log_softmax(z):
  return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def cross_entropy(log_q, y):
  return -np.mean(log_q[np.arange(len(y)), y])


def choose(y, share):
  """Which examples become seeds: evenly spaced in the order of the labels."""
  n = len(y)
  m = n - round((1 - share) * n)
  order = sorted(range(n), key=lambda i: (y[i], i))
  return sorted(
      order[j] for j in range(n) if (j + 1) * m // n > j * m // n
  )


def inner(a, b):
  return sum(np.sum(a[path] * b[path]) for path in a)


def plus(a, b, factor=1.0):
  return {path: a[path] + factor * b[path] for path in a}


class Client:
  """One participant; `others` are the seeds [(j, x, y)] of the others."""

  def __init__(self, net, names, x, y):
    self.net, self.names, self.x, self.y = net, names, x, y
    self.momentum = {path: 0.0 for path in net[0]}

  def posteriors(self, x):
    """P_i, in inference mode."""
    return np.exp(log_softmax(logits(*self.net, x, self.names, False)[0]))

  def descend(self, p, grads, lr):
    self.momentum = plus(grads, self.momentum, 0.9)
    return plus(p, self.momentum, -lr)

  def step(self, others, known, lr, distill_weight, teachers, project, update):
    """One step; `known(j, k)` is P_j on S_k, or None. Returns the losses."""
    p, s = self.net

    def own(p):
      z, _ = logits(p, s, self.x, self.names, True)
      return cross_entropy(log_softmax(z), self.y)

    g_l = gradient(own, p)
    loss_own = own(p)
    _, s_own = logits(p, s, self.x, self.names, True)
    if update == 'alternate':
      p = self.descend(p, g_l, lr)
    x = np.concatenate([x for _, x, _ in others])

    def terms(p):
      log_q = log_softmax(logits(p, s_own, x, self.names, True)[0])
      ce, kl, first = [], [], 0
      for k, _, y in others:
        part = log_q[first : first + len(y)]
        first += len(y)
        ce.append(cross_entropy(part, y))
        whom = [j for j, *_ in others] if teachers == 'all' else [k]
        taught = [known(j, k) for j in whom if known(j, k) is not None]
        kl.append(
            np.mean([
                np.mean(np.sum(q * (np.log(q) - part), axis=1))
                for q in taught
            ]) if taught else 0.0
        )  # fmt: skip
      return np.mean(ce), np.mean(kl)

    def all_seeds(p):
      ce, kl = terms(p)
      return ce + distill_weight * kl

    g_g = gradient(all_seeds, p)
    ce, kl = terms(p)
    _, s = logits(p, s_own, x, self.names, True)
    product, z = inner(g_l, g_g), g_g
    if project and product < 0:
      z = plus(g_g, g_l, -product / inner(g_l, g_l))
    p = self.descend(p, plus(g_l, z) if update == 'sum' else z, lr)
    self.net = p, s
    return loss_own, ce, kl, float(product < 0)


def run(clients, seeds, cohorts, steps, teachers, **options):
  """Rounds of the given cohorts.

  Returns [{client: mean losses}] by round; `clients` change in place.
  """
  # P_j on every S_k, by (j, k).
  table, all_losses = {}, []
  for cohort in cohorts:
    before, losses = dict(table), {}
    for i in cohort:
      client = clients[i]
      others = [(j, *seeds[j]) for j in range(len(seeds)) if j != i]
      losses[i] = np.mean(
          [
              client.step(
                  others,
                  lambda j, k, before=before: before.get((j, k)),
                  teachers=teachers,
                  **options,
              )
              for _ in range(steps)
          ],
          axis=0,
      )
      for k, (x, _) in enumerate(seeds):
        table[i, k] = client.posteriors(x)
    all_losses.append(losses)
  return all_losses, table
