"""FCCL for dense nets with norms in NumPy, written from the paper.

A net is as in `feddf_numpy`: (parameters {path: array}, running statistics
{block: (mean, var)}). A client is a dict: `names` of the net's blocks, examples
`x` [B, D] and `y` [B], the nets `now` and `frozen`, and the logits `published`.
"""

import numpy as np

from tests.algorithms.feddf_numpy import log_softmax, logits
from tests.algorithms.scalefl_numpy import gradient


def correlation_loss(z, t, weight):
  """The loss of logits [N, C] and their target, entry by entry of M."""
  n, c = z.shape
  total = 0
  for u in range(c):
    for v in range(c):
      a, b = z[:, u] - z[:, u].mean(), t[:, v] - t[:, v].mean()
      spread = np.sqrt((a**2).sum() / (n - 1) * (b**2).sum() / (n - 1))
      m = (a * b).sum() / spread / n
      total = total + ((m - 1) ** 2 if u == v else weight * (m + 1) ** 2)
  return total


def kl(teacher, student):
  """Mean KL(softmax(teacher) || softmax(student))."""
  p, q = log_softmax(teacher), log_softmax(student)
  return np.mean(np.sum(np.exp(p) * (p - q), axis=1))


def cross_entropy(z, y):
  return -np.mean(log_softmax(z)[np.arange(len(y)), y])


def step(net, names, x, loss_of, lr, speed, momentum=0.9):
  """A step of SGD with momentum on a loss of logits in training mode.

  `speed` is changed in place. Returns the net and the loss before the step.
  """
  p, s = net

  def loss(p):
    return loss_of(logits(p, s, x, names, True)[0])

  grads, after = gradient(loss, p), logits(p, s, x, names, True)[1]
  for path, g in grads.items():
    speed[path] = momentum * speed.get(path, 0) + g
  moved = {path: leaf - lr * speed[path] for path, leaf in p.items()}
  return (moved, after), loss(p)


def published(net, names, public, num_batches):
  """Logits in training mode of batches of evenly spaced public examples."""
  z = np.zeros((len(public), 0))
  for i in range(num_batches):
    rows = logits(*net, public[i::num_batches], names, True)[0]
    z = z if z.size else np.zeros((len(public), rows.shape[1]))
    z[i::num_batches] = rows
  return z


def pretrain(client, public, num_batches, lr, steps):
  """Trains a client alone, on all examples at once, and freezes a copy."""
  net, speed = client['now'], {}
  for _ in range(steps):
    net, _ = step(
        net, client['names'], client['x'],
        lambda z: cross_entropy(z, client['y']), lr, speed,
    )  # fmt: skip
  z = published(net, client['names'], public, num_batches)
  return dict(client, now=net, frozen=net, published=z)


def visit(
    client, others, public, batches, num_batches, lr, steps, weight, inter,
    intra, previous_target, forgets,
):  # fmt: skip
  """A client's part of a round.

  Args:
    client: The client.
    others: [P, C] logits of each other client.
    public: [P, D], the public examples.
    batches: Positions of each minibatch of the public examples.
    num_batches: Batches in which logits are published.
    lr: Learning rate.
    steps: Local steps on all own examples.
    weight: Of the entries of M off the diagonal.
    inter: Factor on the KL from the previous net.
    intra: Factor on the KL from the frozen net.
    previous_target: Whether the previous net's logits are in the target.
    forgets: Whether momentum begins anew in each public step.

  Returns:
    The client, and its mean losses: (on public examples, cross-entropy, KL from
    the previous net, KL from the frozen net).
  """
  names, x, y = client['names'], client['x'], client['y']
  net = before = client['now']
  speed, collaborative = {}, []
  for batch in batches:
    mode = not previous_target
    own, _ = logits(
        *(before if previous_target else net), public if previous_target
        else public[batch], names, mode,
    )  # fmt: skip
    own = own[batch] if previous_target else own
    target = np.mean([*(z[batch] for z in others), own], axis=0)
    net, loss = step(
        net, names, public[batch],
        lambda z, target=target: correlation_loss(z, target, weight), lr,
        {} if forgets else speed,
    )  # fmt: skip
    collaborative.append(loss)
  teachers = [
      logits(*teacher, x, names, False)[0]
      for teacher in (before, client['frozen'])
  ]
  speed, parts = {}, []
  for _ in range(steps):
    z, _ = logits(*net, x, names, True)
    parts.append((cross_entropy(z, y), *(kl(t, z) for t in teachers)))
    net, _ = step(
        net, names, x,
        lambda z: (
            cross_entropy(z, y) + inter * kl(teachers[0], z)
            + intra * kl(teachers[1], z)
        ),
        lr, speed,
    )  # fmt: skip
  z = published(net, names, public, num_batches)
  losses = (np.mean(collaborative), *np.mean(parts, axis=0))
  return dict(client, now=net, published=z), losses


def one_round(clients, batches, **settings):
  """A round of all clients; `batches` has one list of minibatches for each."""
  done = [
      visit(
          client,
          [other['published'] for other in clients if other is not client],
          batches=batches[k],
          **settings,
      )
      for k, client in enumerate(clients)
  ]
  return [client for client, _ in done], [losses for _, losses in done]
