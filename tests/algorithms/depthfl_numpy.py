"""A round of DepthFL for a dense net in NumPy, written from the paper.

Trees are {path: array}; running statistics are {layer: (mean, variance)}.
"""

import numpy as np

from tests.algorithms.scalefl_numpy import gradient, softmax

# Names of the classifiers behind the layers 1, 2 and 4.
CLASSIFIERS = {1: 'exit1', 2: 'exit2', 4: 'head'}


def layer_names(depth):
  return ['stem', *(f'layer{i}' for i in range(1, depth + 1))]


def owned(theta, depth):
  """The part of a client with `depth` layers behind the stem."""
  blocks = layer_names(depth)
  blocks += [name for i, name in CLASSIFIERS.items() if i <= depth]
  return {path: leaf for path, leaf in theta.items() if path[0] in blocks}


def forward(p, stats, x, depth, train):
  """Logits of all classifiers, and the running statistics afterwards."""
  found, new = [], {}
  for i, name in enumerate(layer_names(depth)):
    x = x @ p[name, 'linear', 'kernel'] + p[name, 'linear', 'bias']
    mean, variance = stats[name]
    if train:
      old_mean, old_variance = mean, variance
      mean = x.mean(axis=0)
      variance = ((x - mean) ** 2).mean(axis=0)
      new[name] = (
          0.9 * old_mean + 0.1 * mean, 0.9 * old_variance + 0.1 * variance
      )  # fmt: skip
    x = (x - mean) / np.sqrt(variance + 1e-5)
    x = x * p[name, 'norm', 'scale'] + p[name, 'norm', 'bias']
    x = np.where(x.real > 0, x, 0)
    if i in CLASSIFIERS:
      head = CLASSIFIERS[i]
      found.append(x @ p[head, 'kernel'] + p[head, 'bias'])
  return found, new


def mutual_loss(logits, y, weight, targets):
  """L without FedDyn; `targets` are the fixed probabilities p_m."""
  total, d = 0.0, len(logits)
  for j, z in enumerate(logits):
    p = softmax(z)
    total += -np.mean(np.log(p[np.arange(len(y)), y]))
    for m, q in enumerate(targets):
      if m != j:
        kl = np.mean(np.sum(q * (np.log(q) - np.log(p)), axis=1))
        total += weight / (d - 1) * kl
  return total


def train(start, stats, linear, depth, x, y, weight, alpha, lr, steps):
  """Full-batch steps of one client on all terms of L."""
  p = dict(start)
  for _ in range(steps):
    logits, new = forward(p, stats, x, depth, True)
    targets = [softmax(z) for z in logits]

    def loss(q, stats=stats, targets=targets):
      logits, _ = forward(q, stats, x, depth, True)
      total = mutual_loss(logits, y, weight, targets)
      for path, leaf in q.items():
        total -= np.sum(linear[path] * leaf)
        total += alpha / 2 * np.sum((leaf - start[path]) ** 2)
      return total

    grads = gradient(loss, p)
    p = {path: leaf - lr * grads[path] for path, leaf in p.items()}
    stats = new
  return p, stats


def one_round(
    theta, stats, h, multipliers, clients, *, weight, alpha, num_clients, lr,
    steps,
):  # fmt: skip
  """A round of the clients {k: (depth, x, y)}, which have examples.

  Returns theta, statistics, h and the multipliers lambda_k.
  """
  ends, multipliers = {}, dict(multipliers)
  for k, (depth, x, y) in clients.items():
    start = owned(theta, depth)
    ends[k] = train(
        start, stats, multipliers[k], depth, x, y, weight, alpha, lr, steps
    )
    multipliers[k] = {
        path: old - alpha * (ends[k][0][path] - start[path])
        for path, old in multipliers[k].items()
    }
  new_theta, new_h, new_stats = dict(theta), dict(h), dict(stats)
  for path, old in theta.items():
    values = [p[path] for p, _ in ends.values() if path in p]
    if values:
      c, mean = len(values), np.mean(values, axis=0)
      new_h[path] = h[path] - alpha * (c / num_clients) * (mean - old)
      new_theta[path] = mean - new_h[path] / alpha
  for layer in stats:
    values = [own[layer] for _, own in ends.values() if layer in own]
    if values:
      new_stats[layer] = tuple(np.mean(values, axis=0))
  return new_theta, new_stats, new_h, multipliers
