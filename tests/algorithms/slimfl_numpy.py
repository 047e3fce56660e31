"""A round of SlimFL for a dense net in NumPy, written from the papers."""

import functools

import numpy as np

from tests.algorithms.fjord_numpy import (
  KEEP,
  forward,
  gradient,
  log_softmax,
  narrowed,
  units,
)


def joint_loss(theta, x, y, sizes, factors, alpha, constants):
  """sum_p c_p L_p, with soft cross-entropy for in-place distillation.

  Args:
    theta: The client's slice.
    x: [n, D].
    y: [n].
    sizes: Units of each of its nets, ascending.
    factors: c_p of each.
    alpha: The factor on the soft cross-entropy.
    constants: [n, C] probabilities of its widest net.

  Returns:
    The loss, without the teacher's entropy.
  """
  loss, rows = 0, np.arange(len(y))
  for k, factor in zip(sizes, factors, strict=True):
    log_q = log_softmax(forward(theta, x, k)[0])
    part = -log_q[rows, y].mean()
    if k != sizes[-1]:
      soft = -(constants * log_q).sum(axis=1).mean()
      part = (1 - alpha) * part + alpha * soft
    loss = loss + factor * part
  return loss


def local_training(theta, stats, x, y, size, options):
  """A client's slice and statistics after its steps, on all of its examples.

  Args:
    theta: Its slice.
    stats: {p: {(layer, 'mean' or 'var'): [k]}} for its widths.
    x: [n, D].
    y: [n].
    size: Units of the full net.
    options: steps, factors {p: c_p}, alpha, lr, momentum and decay.

  Returns:
    The slice and the statistics.
  """
  widths = sorted(stats)
  sizes = [units(p, size) for p in widths]
  factors = [options['factors'][p] for p in widths]
  velocity = {key: np.zeros_like(leaf) for key, leaf in theta.items()}
  stats = {p: dict(values) for p, values in stats.items()}
  for _ in range(options['steps']):
    found = [forward(theta, x, k) for k in sizes]
    loss = functools.partial(
        joint_loss, x=x, y=y, sizes=sizes, factors=factors,
        alpha=options['alpha'], constants=np.exp(log_softmax(found[-1][0])),
    )  # fmt: skip
    grads = gradient(loss, theta)
    for key, leaf in theta.items():
      decayed = grads[key] + options['decay'] * leaf
      velocity[key] = options['momentum'] * velocity[key] + decayed
    theta = {
        key: leaf - options['lr'] * velocity[key] for key, leaf in theta.items()
    }
    for p, (_, moments) in zip(widths, found, strict=True):
      for key, new in moments.items():
        stats[p][key] = KEEP * stats[p][key] + (1 - KEEP) * new
  return theta, stats


def one_round(theta, stats, clients, size, **options):
  """The server after a round.

  Args:
    theta: {(layer, leaf): array} of the full net.
    stats: {p: {(layer, 'mean' or 'var'): [k]}}, one entry for each width.
    clients: [(p_k, x, y, parts)]; of the parts of an upload, the first 0, 1
      or 2 arrive.
    size: Units of the full net.
    **options: As for `local_training`.

  Returns:
    theta and the statistics.
  """
  thinnest = min(stats)
  total = {key: np.zeros_like(leaf) for key, leaf in theta.items()}
  count = {key: np.zeros_like(leaf) for key, leaf in theta.items()}
  uploads = {p: [] for p in stats}
  for largest, x, y, parts in clients:
    k, n = units(largest, size), len(x)
    start = {key: narrowed(key, leaf, k) for key, leaf in theta.items()}
    own = {p: values for p, values in stats.items() if p <= largest}
    end, moments = local_training(start, own, x, y, size, options)
    if not parts:
      continue
    # What arrived is the slice of one of its nets.
    arrived = units(largest if parts == 2 else thinnest, size)
    for key, leaf in end.items():
      narrowed(key, total[key], arrived)[...] += n * narrowed(
          key, leaf, arrived
      )
      narrowed(key, count[key], arrived)[...] += n
    for p in own:
      if parts == 2 or p == thinnest:
        uploads[p].append((n, moments[p]))
  theta = {
      key: np.where(n > 0, total[key] / np.maximum(n, 1), theta[key])
      for key, n in count.items()
  }
  stats = dict(stats)
  for p, sent in uploads.items():
    if sent:
      examples = sum(n for n, _ in sent)
      stats[p] = {
          key: sum(n * values[key] for n, values in sent) / examples
          for key in stats[p]
      }
  return theta, stats
