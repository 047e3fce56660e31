"""A round of ScaleFL for a dense net in NumPy, written from the paper."""

import functools

import numpy as np

# Names of the exits behind the layers 1, 2 and 4.
EXIT_AFTER = {1: 'exit1', 2: 'exit2', 4: 'head'}


def softmax(z):
  e = np.exp(z)
  return e / e.sum(axis=1, keepdims=True)


def logits(p, x, rate, cut):
  """Logits of the exits behind the layers 1 to `cut`."""
  found = []
  for i in range(cut + 1):
    name = f'layer{i}' if i else 'stem'
    x = x @ p[name, 'linear', 'kernel'] + p[name, 'linear', 'bias']
    x = x / rate
    if (name, 'norm', 'scale') in p:
      x = x - x.mean(axis=0)
      x = x / np.sqrt((x**2).mean(axis=0) + 1e-5)
      x = x * p[name, 'norm', 'scale'] + p[name, 'norm', 'bias']
    x = np.where(x.real > 0, x, 0)
    if i in EXIT_AFTER:
      head = EXIT_AFTER[i]
      found.append(x @ p[head, 'kernel'] + p[head, 'bias'])
  return found


def loss(p, x, y, rate, cut, gamma, temperature, teacher=None):
  """L of one batch; `teacher` are fixed logits of the last exit, for KD."""
  found = logits(p, x, rate, cut)
  n, total = len(found), 0.0
  q = softmax((found[-1] if teacher is None else teacher) / temperature)
  for j, z in enumerate(found, 1):
    total += j * -np.mean(np.log(softmax(z)[np.arange(len(y)), y]))
    if j < n:
      gap = np.log(q) - np.log(softmax(z / temperature))
      # The mean over examples and classes.
      total += j * gamma * temperature**2 * np.mean(q * gap)
  return total * 2 / (n * (n + 1))


def gradient(loss_fn, p):
  """The gradient of a loss by complex steps.

  For tiny h, f(p + ih) = f(p) + ih f'(p) without a difference of large numbers.
  """
  grads = {}
  for path, leaf in p.items():
    grads[path] = np.zeros_like(leaf)
    for i in np.ndindex(leaf.shape):
      moved = leaf.astype(complex)
      moved[i] += 1e-20j
      grads[path][i] = loss_fn({**p, path: moved}).imag / 1e-20
  return grads


def entries(path, leaf, rate):
  """Leading units; all inputs of the net, and all classes."""
  kept = slice(int(rate * 4))
  if path[0] in EXIT_AFTER.values():
    return (kept, slice(None)) if path[-1] == 'kernel' else (slice(None),)
  if path[-1] == 'kernel':
    return (slice(None) if path[0] == 'stem' else kept, kept)
  return (kept,)


def one_round(theta, clients, gamma, temperature, lr, steps):
  """{path: array} after a round of (rate, cut, x [B, D], y) clients."""
  values = {path: [] for path in theta}
  for rate, cut, x, y in clients:
    blocks = ['stem', *(f'layer{i}' for i in range(1, cut + 1))]
    blocks += [head for i, head in EXIT_AFTER.items() if i <= cut]
    p = {
        path: leaf[entries(path, leaf, rate)]
        for path, leaf in theta.items()
        if path[0] in blocks
    }
    for _ in range(steps):
      loss_fn = functools.partial(
          loss, x=x, y=y, rate=rate, cut=cut, gamma=gamma,
          temperature=temperature, teacher=logits(p, x, rate, cut)[-1],
      )  # fmt: skip
      grads = gradient(loss_fn, p)
      p = {path: leaf - lr * grads[path] for path, leaf in p.items()}
    for path, leaf in p.items():
      # NaN where the client has no entry.
      whole = np.full_like(theta[path], np.nan)
      whole[entries(path, whole, rate)] = leaf
      values[path].append(whole)
  new = {}
  for path, leaf in theta.items():
    held = ~np.isnan(values[path])
    total = np.sum(np.where(held, values[path], 0), axis=0)
    count = np.sum(held, axis=0)
    new[path] = np.where(count, total / np.maximum(count, 1), leaf)
  return new
