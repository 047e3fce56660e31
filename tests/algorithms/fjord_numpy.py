"""A round of FjORD for a dense net in NumPy, written from the paper."""

from fractions import Fraction
import functools

import numpy as np

LAYERS = ('stem', 'layer1')
KEEP = 0.9  # The share of the old running statistics that a step keeps.


def units(p: Fraction, size: int) -> int:
  """The smallest integer of at least p * size."""
  return -(-p.numerator * size // p.denominator)


def forward(theta, x, k):
  """Logits of the first k units of each layer, and the norms' moments."""
  moments = {}
  for name in LAYERS:
    inputs = x.shape[1]
    x = x @ theta[name, 'w'][:inputs, :k] + theta[name, 'b'][:k]
    moments[name, 'mean'] = x.mean(axis=0)
    x = x - moments[name, 'mean']
    moments[name, 'var'] = (x**2).mean(axis=0)
    x = x / np.sqrt(moments[name, 'var'] + 1e-5)
    x = x * theta[name, 'scale'][:k] + theta[name, 'shift'][:k]
    x = np.where(x.real > 0, x, 0)
  return x @ theta['head', 'w'][:k] + theta['head', 'b'], moments


def log_softmax(z):
  z = z - z.real.max(axis=1, keepdims=True)
  return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def step_loss(theta, x, y, k, largest, alpha, temperature, fixed):
  """The paper's loss; `fixed` are the teacher's logits as constants."""
  rows = np.arange(len(y))
  student, _ = forward(theta, x, k)
  hard = -log_softmax(student)[rows, y].mean()
  if not alpha:
    return hard
  teacher, _ = forward(theta, x, largest)
  target = log_softmax(fixed / temperature)
  gap = target - log_softmax(student / temperature)
  soft = temperature**2 * (np.exp(target) * gap).sum(axis=1).mean()
  own = -log_softmax(teacher)[rows, y].mean()
  return own + (1 - alpha) * hard + alpha * soft


def gradient(function, theta):
  """The gradient of a real function, entry by entry, by a complex step."""
  found = {}
  for key, leaf in theta.items():
    found[key] = np.empty_like(leaf)
    for place in np.ndindex(leaf.shape):
      moved = leaf + 0j
      moved[place] += 1e-30j
      found[key][place] = function({**theta, key: moved}).imag / 1e-30
  return found


def narrowed(key, leaf, k):
  """The slice of a leaf that a net of k units per layer has."""
  layer, name = key
  if layer == 'head':
    return leaf[:k] if name == 'w' else leaf
  if name == 'w' and layer != 'stem':
    return leaf[:k, :k]
  return leaf[..., :k]


def local_training(theta, stats, client, size, options):
  """A client's slice and statistics after its steps.

  Args:
    theta: Its slice.
    stats: {p: {(layer, 'mean' or 'var'): [k]}} for its widths.
    client: (x [n, D], y [n], the width drawn in each step).
    size: Units of the full net.
    options: alpha, temperature, lr, momentum and decay.

  Returns:
    The slice and the statistics.
  """
  x, y, draws = client
  largest = units(max(stats), size)
  velocity = {key: np.zeros_like(leaf) for key, leaf in theta.items()}
  stats = {p: dict(values) for p, values in stats.items()}
  for p in draws:
    teacher, moments = forward(theta, x, largest)
    seen = {}
    if options['alpha']:
      seen[max(stats)] = moments
    if p not in seen:
      seen[p] = forward(theta, x, units(p, size))[1]
    loss = functools.partial(
        step_loss, x=x, y=y, k=units(p, size), largest=largest,
        alpha=options['alpha'], temperature=options['temperature'],
        fixed=teacher,
    )  # fmt: skip
    grads = gradient(loss, theta)
    for key, leaf in theta.items():
      decayed = grads[key] + options['decay'] * leaf
      velocity[key] = options['momentum'] * velocity[key] + decayed
    theta = {
        key: leaf - options['lr'] * velocity[key] for key, leaf in theta.items()
    }
    for q, moments in seen.items():
      for key, new in moments.items():
        stats[q][key] = KEEP * stats[q][key] + (1 - KEEP) * new
  return theta, stats


def one_round(theta, stats, clients, size, **options):
  """The server after a round; shells of the widths are averaged in turn.

  Args:
    theta: {(layer, leaf): array} of the full net.
    stats: {p: {(layer, 'mean' or 'var'): [k]}}, one entry for each width.
    clients: [(p_k, x, y, the width drawn in each step)].
    size: Units of the full net.
    **options: alpha, temperature, lr, momentum and decay.

  Returns:
    theta and the statistics.
  """
  ends = []
  for largest, *client in clients:
    k = units(largest, size)
    start = {key: narrowed(key, leaf, k) for key, leaf in theta.items()}
    own = {p: values for p, values in stats.items() if p <= largest}
    ends.append(local_training(start, own, client, size, options))
  theta = {key: leaf.copy() for key, leaf in theta.items()}
  stats = {p: dict(values) for p, values in stats.items()}
  # From the widest slice to the narrowest: each overwrites its own entries.
  for p in sorted(stats, reverse=True):
    k = units(p, size)
    holders = [
        (len(client[1]), *end)
        for client, end in zip(clients, ends, strict=True)
        if client[0] >= p
    ]
    examples = sum(n for n, _, _ in holders)
    if not examples:
      continue
    for key, leaf in theta.items():
      inside = narrowed(key, leaf, k)  # A view.
      inside[...] = sum(
          n * narrowed(key, end[key], k) for n, end, _ in holders
      ) / examples
    for key in stats[p]:
      stats[p][key] = sum(n * s[p][key] for n, _, s in holders) / examples
  return theta, stats
