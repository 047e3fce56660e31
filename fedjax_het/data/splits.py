"""What follows a partition: validation and test splits, and groups."""

import numpy as np

from fedjax_het.data import dealing


def split_validation(parts, fraction, *, seed, labels=None):
  """Holds out floor(fraction n_k) random examples of every client.

  A client's split depends on the seed, its index and its own examples alone.

  Args:
    parts: One array of example indices per client.
    fraction: Share held out, in [0, 1); FeDepth and FedFomo use 0.2.
    seed: Integer >= 0.
    labels: [n] integers, or None. Given, the held-out share of each of a
      client's classes is `fraction` to within one example (stratified).

  Returns:
    (training parts, validation parts), int32 arrays; a validation part may be
    empty, a training part of a non-empty client is not.

  Raises:
    ValueError: If `fraction` is outside [0, 1).
  """
  dealing.check_real('fraction', fraction, above_zero=False)
  if fraction >= 1:
    raise ValueError(f'fraction must be in [0, 1), but is {fraction!r}.')
  train, validation = [], []
  for client, part in enumerate(parts):
    rng = dealing.generator(seed, client)
    part = rng.permutation(np.asarray(part, np.int32))
    # The small addend keeps 0.29 * 100 = 28.999... from losing an example.
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
  """Sets aside a public set, with the classes in their proportions.

  Args:
    labels: [n] integers.
    size: Examples of the public set.
    seed: Integer >= 0.

  Returns:
    (public, rest), int32 indices in ascending order that together are 0..n-1.

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
  # A stream of its own, apart from the clients' of `split_validation`.
  rng = dealing.generator(seed, 2**31 - 1)
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
  """Gives some examples another label (symmetric label noise).

  Args:
    labels: [n] integers in 0..C-1.
    share: In [0, 1); round(share n) examples, drawn at random, are wrong.
    num_classes: C, at least 2.
    seed: Integer >= 0.

  Returns:
    [n] labels of the same type; each wrong one is uniform over the C - 1
    other classes.

  Raises:
    ValueError: If `share` is outside [0, 1).
  """
  dealing.check_real('share', share, above_zero=False)
  if share >= 1:
    raise ValueError(f'share must be in [0, 1), but is {share!r}.')
  labels = np.array(labels)
  rng = dealing.generator(seed, 2**31 - 2)  # A stream of its own.
  wrong = rng.permutation(len(labels))[: round(share * len(labels))]
  labels[wrong] += rng.integers(1, num_classes, len(wrong), labels.dtype)
  labels[wrong] %= num_classes
  return labels


def split_like(labels, parts, test_labels, *, seed):
  """Divides a test set as a partition divided the training set.

  Client k gets the share of each test class that it holds of that class's
  training examples that have an owner. So label rows (`beta`) carry over as
  they are, and so do label histograms where both sets have the same class
  proportions. Each test example of a class with an owner is given out once.

  Args:
    labels: [n] integers, of the training set.
    parts: One array of training indices per client.
    test_labels: [m] integers.
    seed: Integer >= 0.

  Returns:
    One int32 array of test indices per client, each within one example a
    class of its exact share; a very small client may get none.

  Raises:
    ValueError: If `seed` is not an integer >= 0.
  """
  rng = dealing.generator(seed)
  labels, test_labels = np.asarray(labels), np.asarray(test_labels)
  out = [[] for _ in parts]
  for c in np.unique(test_labels):
    held = np.array([np.sum(labels[part] == c) for part in parts])
    members = rng.permutation(np.flatnonzero(test_labels == c))
    if not held.sum():
      continue
    # In random order: rounding must not favour the same clients every time.
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
  """Says to which group (model architecture) each client belongs.

  Args:
    counts: {group: number of clients}, in order.
    seed: None for contiguous clients in the order of `counts`; an integer >= 0
      for a random assignment. Use one wherever a client's index says
      something about its labels (contiguous or sorted partitions), lest
      architecture and labels be confounded.

  Returns:
    The group of each client, a list of length sum(counts.values()).

  Raises:
    ValueError: If there is no client, or a count or the seed is no integer
      >= 0.
  """
  group_of = []
  for group, count in counts.items():
    dealing.check_count(f'Number of clients of group {group!r}', count, 0)
    group_of += [group] * int(count)
  if not group_of:
    raise ValueError(f'The groups {dict(counts)} hold no client.')
  if seed is None:
    return group_of
  order = dealing.generator(seed).permutation(len(group_of))
  return [group_of[i] for i in order]
