"""Dense nets in NumPy with finite-difference gradients, to check rounds."""

import jax
import numpy as np

STEP = 1e-6


def gradient(loss, params):
  """Central differences of a scalar function.

  Args:
    loss: `(params) -> float`, in float64.
    params: {block: {leaf: float64 array}}.

  Returns:
    The gradient, with the structure of `params`.
  """
  params = {n: {i: a.copy() for i, a in tree.items()}
            for n, tree in params.items()}  # fmt: skip
  grads = {}
  for name, tree in params.items():
    grads[name] = {}
    for leaf, array in tree.items():
      grad = np.zeros_like(array)
      for place in np.ndindex(array.shape):
        old = array[place]
        ends = []
        for sign in (1, -1):
          array[place] = old + sign * STEP
          ends.append(loss(params))
        array[place] = old
        grad[place] = (ends[0] - ends[1]) / (2 * STEP)
      grads[name][leaf] = grad
  return grads


def combine(fn, *trees):
  """`fn` leaf by leaf on trees of two levels."""
  return {
      name: {leaf: fn(*(t[name][leaf] for t in trees)) for leaf in first}
      for name, first in trees[0].items()
  }


def dense(x, layer):
  """x W + b."""
  return x @ layer['kernel'] + layer['bias']


def net(params, names, x):
  """[B, C] outputs of dense layers, with ReLU after all but the last."""
  for name in names[:-1]:
    x = np.maximum(dense(x, params[name]), 0.0)
  return dense(x, params[names[-1]])


def log_softmax(z):
  """Log-probabilities of [..., C] logits."""
  z = z - z.max(axis=-1, keepdims=True)
  return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def cross_entropies(z, y):
  """[B] cross-entropies of [B, C] logits and [B] labels."""
  return -log_softmax(z)[np.arange(len(y)), y]


def divergences(teacher, student):
  """[B], KL(softmax(teacher) || softmax(student))."""
  log_p, log_q = log_softmax(teacher), log_softmax(student)
  return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def as_list(model, variables):
  """A net of dense layers as a list of (kernel, bias) in float64."""
  layers = (variables.params[name]['Dense_0'] for name in model.block_names)
  return [
      tuple(np.asarray(layer[k], np.float64) for k in ('kernel', 'bias'))
      for layer in layers
  ]


def nets_and_examples(federation, clients, data, sizes):
  """What an oracle of a round begins with.

  Args:
    federation: The federation.
    clients: {group: client states on a leading axis}, with `variables`.
    data: The federated data.
    sizes: Examples of each client.

  Returns:
    Every client's net, see `as_list`, and every client's inputs [n, D] in
    float64 with their labels [n].
  """
  group_of, row_of = federation.places()
  images = np.asarray(data.preprocess(data.images), np.float64)
  images, labels = images.reshape(len(images), -1), np.asarray(data.labels)
  nets, owned = [], []
  for k, size in enumerate(sizes):
    group = federation.groups[group_of[k]]
    mine = jax.tree.map(
        lambda leaf, row=row_of[k]: leaf[row], clients[group.name].variables
    )
    nets.append(as_list(group.model, mine))
    index = np.asarray(data.index[k, :size])
    owned.append((images[index], labels[index]))
  return nets, owned
