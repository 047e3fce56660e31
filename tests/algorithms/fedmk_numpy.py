"""Rounds of FedMK for dense nets with batch norms in NumPy, from the paper.

Minibatches are whole: a step sees all examples. Each block is a dense layer, a
norm and a ReLU, the last block a dense layer alone. Parameters are {(block,
leaf): array}. The inner gradient is written out by hand, for complex numbers,
so that the outer one can be taken by complex steps.
"""

import numpy as np

from tests.algorithms.scalefl_numpy import gradient

EPS = 1e-5


def forward(p, names, x):
  """[B, C] logits in training mode, and what the backward pass reads."""
  x, seen = x.reshape(len(x), -1), []
  for name in names[:-1]:
    z = x @ p[name, 'kernel'] + p[name, 'bias']
    mean = z.mean(axis=0)
    var = ((z - mean) ** 2).mean(axis=0)
    scaled = (z - mean) / np.sqrt(var + EPS)
    out = scaled * p[name, 'scale'] + p[name, 'shift']
    on = out.real > 0
    seen.append((x, mean, var, scaled, on))
    x = np.where(on, out, 0)
  head = names[-1]
  return x @ p[head, 'kernel'] + p[head, 'bias'], (seen, x)


def log_softmax(z):
  return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def losses(z, y):
  return -log_softmax(z)[np.arange(len(y)), y]


def backward(p, names, x, y):
  """The gradient of the mean cross-entropy, by the chain rule."""
  z, (seen, last) = forward(p, names, x)
  d = np.exp(log_softmax(z))
  d[np.arange(len(y)), y] -= 1
  d = d / len(y)
  head, grads = names[-1], {}
  grads[head, 'kernel'], grads[head, 'bias'] = last.T @ d, d.sum(axis=0)
  d = d @ p[head, 'kernel'].T
  for name, (below, _, var, scaled, on) in zip(names[-2::-1], seen[::-1]):
    d = np.where(on, d, 0)
    grads[name, 'scale'] = (d * scaled).sum(axis=0)
    grads[name, 'shift'] = d.sum(axis=0)
    d = d * p[name, 'scale']
    along = (d * scaled).mean(axis=0)
    d = (d - d.mean(axis=0) - scaled * along) / np.sqrt(var + EPS)
    grads[name, 'kernel'], grads[name, 'bias'] = below.T @ d, d.sum(axis=0)
    d = d @ p[name, 'kernel'].T
  return grads


def weights(loss, tau):
  phi = 1 / (1 + np.exp(-tau * loss))
  return phi / phi.mean()


def condense(p, names, x, y, real, steps, inner_lr, lr, tau):
  """X_k after the steps, and the mean of the outer and of the inner loss."""
  found = []

  def of_real(x):
    grads = backward(p, names, x, y)
    moved = {path: leaf - inner_lr * grads[path] for path, leaf in p.items()}
    return losses(forward(moved, names, real[0])[0], real[1])

  for _ in range(steps):
    phi = weights(of_real(x), tau)  # Constant.
    found.append((
        np.mean(phi * of_real(x)), np.mean(losses(forward(p, names, x)[0], y))
    ))  # fmt: skip
    grads = gradient(
        lambda at, phi=phi: np.mean(phi * of_real(at['x'])), {'x': x}
    )
    x = np.clip(x - lr * grads['x'], -1, 1)
  return x, np.mean(found, axis=0)


def train(p, stats, names, x, y, steps, lr):
  """The server's parameters and running statistics after whole batches."""
  for _ in range(steps):
    _, (seen, _) = forward(p, names, x)
    stats = {
        name: tuple(
            0.9 * old + 0.1 * new
            for old, new in zip(stats[name], (mean, var), strict=True)
        )
        for name, (_, mean, var, _, _) in zip(names, seen)
    }
    grads = backward(p, names, x, y)
    p = {path: leaf - lr * grads[path] for path, leaf in p.items()}
  return p, stats
