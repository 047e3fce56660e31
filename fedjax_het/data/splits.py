"""Validation, public and test splits, label noise and group assignment."""

import numpy as np

from fedjax_het.data import assignment
from fedjax_het.options import at_least, between


def split_validation(parts, fraction, *, seed, labels=None):
  """Holds out floor(fraction n_k) random examples of every client.

  A client's split depends only on the seed, its index and its examples.

  Args:
    parts: One array of example indices per client.
    fraction: Held-out fraction, in [0, 1); FeDepth and FedFomo use 0.2.
    seed: Integer >= 0.
    labels: [n] integers for a stratified split (each class of a client is
      held out to `fraction`, within one example), or None.

  Returns:
    (training parts, validation parts), int32 arrays. A validation part may be
    empty; the training part of a non-empty client is not.

  Raises:
    ValueError: If `fraction` is outside [0, 1).
  """
  between(0, 1, below=True, fraction=fraction)
  train, validation = [], []
  for client, part in enumerate(parts):
    rng = assignment.generator(seed, client)
    part = rng.permutation(np.asarray(part, np.int32))
    # + 1e-9: 0.29 * 100 = 28.999... would lose an example.
    num_held_out = int(fraction * len(part) + 1e-9)
    held_out = np.zeros(len(part), bool)
    held_out[:num_held_out] = True
    if labels is not None and num_held_out:
      by_class = np.argsort(np.asarray(labels)[part], kind='stable')
      even = (np.arange(num_held_out) + rng.random()) / num_held_out
      held_out[:] = False
      held_out[by_class[(even * len(part)).astype(int)]] = True
    train.append(part[~held_out])
    validation.append(part[held_out])
  return train, validation


def split_public(labels, size, *, seed):
  """Holds out a public set with the class proportions of the whole.

  Args:
    labels: [n] integers.
    size: Number of public examples.
    seed: Integer >= 0.

  Returns:
    (public, rest), ascending int32 indices; their union is 0..n-1.

  Raises:
    ValueError: If `size` is not in [1, n - 1].
  """
  labels = np.asarray(labels)
  if not 1 <= size < len(labels):
    raise ValueError(
        f'A public set of {size} examples cannot be taken from '
        f'{len(labels)} training examples and leave some; it must hold '
        f'between 1 and {len(labels) - 1}.'
    )
  # A stream that no client of `split_validation` uses.
  rng = assignment.generator(seed, 2**31 - 1)
  order = rng.permutation(len(labels))
  by_class = order[np.argsort(labels[order], kind='stable')]
  even = (np.arange(size) + rng.random()) / size
  public = np.zeros(len(labels), bool)
  public[by_class[(even * len(labels)).astype(int)]] = True
  return (
      np.flatnonzero(public).astype(np.int32),
      np.flatnonzero(~public).astype(np.int32),
  )


def with_wrong_labels(labels, share, num_classes, *, seed):
  """Replaces some labels (symmetric label noise).

  Args:
    labels: [n] integers in 0..C-1.
    share: In [0, 1); round(share n) random examples get a wrong label.
    num_classes: C, at least 2.
    seed: Integer >= 0.

  Returns:
    [n] labels of the same dtype; each wrong one is uniform over the C - 1
    other classes.

  Raises:
    ValueError: If `share` is outside [0, 1), or C is less than 2.
  """
  between(0, 1, below=True, share=share)
  at_least(2, num_classes=num_classes)
  labels = np.asarray(labels)
  rng = assignment.generator(seed, 2**31 - 2)  # A separate stream.
  wrong = rng.permutation(len(labels))[: round(share * len(labels))]
  changed = labels.astype(np.int64)  # Sums may not fit into a narrow type.
  changed[wrong] += rng.integers(1, num_classes, len(wrong), np.int32)
  changed[wrong] %= num_classes
  return changed.astype(labels.dtype)


def split_like(labels, parts, test_labels, *, seed):
  """Partitions a test set in the proportions of a training partition.

  Client k gets the fraction of each test class that it holds of the assigned
  training examples of that class. Clients keep their classes, and also their
  label histograms if both sets have the same class proportions. Each test
  example of a class that some client holds is assigned once.

  Args:
    labels: [n] integers, of the training set.
    parts: One array of training indices per client.
    test_labels: [m] integers.
    seed: Integer >= 0.

  Returns:
    One int32 array of test indices per client, within one example per class
    of the exact fraction. A very small client may get none.

  Raises:
    ValueError: If `seed` is not an integer >= 0.
  """
  rng = assignment.generator(seed)
  labels, test_labels = np.asarray(labels), np.asarray(test_labels)
  out = [[] for _ in parts]
  for c in np.unique(test_labels):
    held = np.array([np.sum(labels[part] == c) for part in parts])
    members = rng.permutation(np.flatnonzero(test_labels == c))
    if not held.sum():
      continue
    # In random order, so rounding does not favour the same clients.
    order = rng.permutation(len(parts))
    edges = np.cumsum(held[order]) * len(members) // held.sum()
    for client, piece in zip(order, np.split(members, edges[:-1]), strict=True):
      out[client].append(piece)
  return [
      rng.permutation(np.concatenate([np.empty(0, int), *pieces])).astype(
          np.int32
      )
      for pieces in out
  ]


def assign_groups(counts, seed=None):
  """Assigns each client to a group (model architecture).

  Args:
    counts: {group: number of clients}, in order.
    seed: None for contiguous clients in the order of `counts`; an integer >= 0
      for a random assignment. Set it if a client's index correlates with its
      labels (contiguous or sorted partitions); otherwise architecture and
      labels are confounded.

  Returns:
    The group of each client, a list of length sum(counts.values()).

  Raises:
    ValueError: If there is no client, or a count or the seed is not an
      integer >= 0.
  """
  return _assign(counts, seed, 2**31 - 3)


def assign_devices(counts, seed=None):
  """Assigns each client to a kind of device, like `assign_groups`.

  With equal seeds the two assignments are independent, and neither follows the
  partition.

  Args:
    counts: {kind: number of clients}, in order.
    seed: None for contiguous clients, or an integer >= 0.

  Returns:
    The kind of each client's device, a list of length sum(counts.values()).

  Raises:
    ValueError: If there is no client, or a count or the seed is not an
      integer >= 0.
  """
  return _assign(counts, seed, 2**31 - 4)


def _assign(counts, seed, stream: int) -> list[str]:
  """Assigns clients to groups; `stream` is a separate stream of the seed."""
  group_of = []
  for group, count in counts.items():
    at_least(0, **{f'Number of clients of group {group!r}': count})
    group_of += [group] * int(count)
  if not group_of:
    raise ValueError(f'The groups {dict(counts)} hold no client.')
  if seed is None:
    return group_of
  order = assignment.generator(seed, stream).permutation(len(group_of))
  return [group_of[i] for i in order]
