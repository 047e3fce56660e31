"""Sampling, splitting and argument checks shared by the partitions."""

import bisect
import itertools
import math

import numpy as np

from fedjax_het.options import at_least, check_range, check_type

NO_OWNER = -1  # Owner of examples that a partition leaves out.


def prepare(labels, num_clients, seed):
  """Checks the arguments that every partition takes.

  Args:
    labels: [n] integers.
    num_clients: Number of clients, 1 to n.
    seed: Integer >= 0.

  Returns:
    The labels renumbered to 0..C-1 over the classes that occur, their number
    C, and a generator.

  Raises:
    ValueError: If an argument is invalid.
  """
  labels = np.asarray(labels)
  if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(
        'labels must be a vector of integers, but have shape '
        f'{labels.shape} and dtype {labels.dtype}.'
    )
  at_least(1, num_clients=num_clients)
  if num_clients > len(labels):
    raise ValueError(
        f'num_clients={num_clients} is more than the {len(labels)} examples; '
        'every client needs at least one.'
    )
  classes, y = np.unique(labels, return_inverse=True)
  return y, len(classes), generator(seed)


def generator(seed, *stream):
  """A numpy generator for a seed (an integer >= 0) and stream numbers."""
  check_type('seed', seed, int, high=math.inf)  # Without an upper bound.
  check_range('seed', seed, low=0)
  # A spawn key: [seed, 0] and plain `seed` would give the same stream.
  return np.random.default_rng(
      np.random.SeedSequence(int(seed), spawn_key=stream)
  )


def check_labels_per_client(labels_per_client, num_classes):
  """Raises ValueError unless it is an integer in 1..num_classes."""
  at_least(1, labels_per_client=labels_per_client)
  if labels_per_client > num_classes:
    raise ValueError(
        f'labels_per_client={labels_per_client} is more than the '
        f'{num_classes} classes of the data.'
    )


def check_num_assigned(num_clients, labels_per_client, num_classes):
  """Checks that every class gets an owner; returns N labels_per_client."""
  check_labels_per_client(labels_per_client, num_classes)
  num_assigned = num_clients * labels_per_client
  if num_assigned < num_classes:
    raise ValueError(
        f'{num_clients} clients of labels_per_client={labels_per_client} own '
        f'at most {num_assigned} of the {num_classes} classes; raise one of '
        'the two so that every class has an owner.'
    )
  return num_assigned


def log_dirichlet(rng, alpha, shape):
  """Logarithms of Dirichlet(alpha) draws, up to a constant per row.

  Uses log Gamma(alpha) = log Gamma(alpha + 1) + log(U) / alpha, which does not
  underflow for small alpha. A row with entries dropped, normalised again, is
  Dirichlet over the remaining entries.

  Args:
    rng: Generator.
    alpha: Concentration > 0.
    shape: Shape of the result; the last axis is the simplex.

  Returns:
    float64 array of `shape`, finite.
  """
  # 1 - U is in (0, 1], so the logarithm is finite.
  boost = np.log1p(-rng.random(shape)) / max(alpha, 1e-200)
  return np.log(rng.standard_gamma(alpha + 1, shape)) + boost


def softmax(logits):
  """exp(logits) normalised over the last axis; -inf gives exactly zero."""
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def apportion(shares, total):
  """Splits total at floor(cumsum(shares) total); returns the [N] counts."""
  edges = np.cumsum(shares)
  edges = np.floor(edges / edges[-1] * total).astype(np.int64)
  return np.diff(edges, prepend=0)


def draw_until(draw, min_size, max_tries, num_examples, num_clients, what):
  """Repeats a draw until every client holds `min_size` examples.

  Args:
    draw: () -> [N, C] counts.
    min_size: Examples that every client must hold.
    max_tries: Maximum number of draws.
    num_examples: n.
    num_clients: N.
    what: Name of the draw, for error messages.

  Returns:
    The first counts that satisfy `min_size`.

  Raises:
    ValueError: If `min_size` is impossible or was not reached.
  """
  at_least(1, min_size=min_size, max_tries=max_tries)
  if min_size * num_clients > num_examples:
    raise ValueError(
        f'min_size={min_size} for {num_clients} clients needs '
        f'{min_size * num_clients} examples, but there are {num_examples}; '
        f'min_size can be at most {num_examples // num_clients}.'
    )
  best = 0
  for _ in range(max_tries):
    counts = draw()
    smallest = counts.sum(axis=1).min()
    if smallest >= min_size:
      return counts
    best = max(best, smallest)
  raise ValueError(
      f'{what} over {num_clients} clients: no draw of {max_tries} gave every '
      f'client min_size={min_size} of the {num_examples} examples (best: '
      f'{best}); raise alpha, or lower min_size or the number of '
      'clients.'
  )


def assign_counts(rng, y, counts):
  """Assigns counts[k, c] random examples of class c to client k."""
  clients = np.arange(len(counts))
  pieces = [
      rng.permutation(np.flatnonzero(y == c)) for c in range(counts.shape[1])
  ]
  owners = [np.repeat(clients, column) for column in counts.T]
  return collect(
      rng, np.concatenate(pieces), np.concatenate(owners), len(counts)
  )


def assign_classes(rng, y, classes, owner, num_clients, share_alpha=None):
  """Divides the examples of each class among its owners.

  Entry i assigns class `classes[i]` to client `owner[i]`. A client that owns a
  class twice gets two shares of it.

  Args:
    rng: Generator.
    y: [n] classes 0..C-1.
    classes: [M] classes 0..C-1.
    owner: [M] clients, or NO_OWNER to leave a share out.
    num_clients: Number of clients.
    share_alpha: None for shares equal up to one example, else the Dirichlet
      concentration of the shares.

  Returns:
    One int32 array per client.
  """
  pieces, owners = [], []
  for c in range(y.max() + 1):
    # In random order, so no client always gets the larger share.
    holders = rng.permutation(np.asarray(owner)[classes == c])
    if not len(holders):
      continue
    members = rng.permutation(np.flatnonzero(y == c))
    counts = even_sizes(len(members), len(holders))
    if share_alpha is not None:
      shares = softmax(log_dirichlet(rng, share_alpha, len(holders)))
      counts = apportion(shares, len(members))
    pieces.append(members)
    owners.append(np.repeat(holders, counts))
  return collect(
      rng, np.concatenate(pieces), np.concatenate(owners), num_clients
  )


def collect(rng, examples, owners, num_clients):
  """Gathers the examples of each client, in random order.

  Args:
    rng: Generator.
    examples: [M] distinct example indices.
    owners: [M] client of each, or NO_OWNER.
    num_clients: Number of clients.

  Returns:
    One int32 array per client.

  Raises:
    ValueError: If a client has no example.
  """
  order = rng.permutation(len(examples))
  order = order[np.argsort(owners[order], kind='stable')]
  edges = np.searchsorted(owners[order], np.arange(num_clients + 1))
  examples = examples[order].astype(np.int32)
  parts = [examples[i:j] for i, j in itertools.pairwise(edges)]
  empty = [client for client, part in enumerate(parts) if not len(part)]
  if empty:
    raise ValueError(
        f'{len(empty)} of {num_clients} clients would get no example (the '
        f'first is client {empty[0]}); use fewer clients or shares that are '
        'less uneven.'
    )
  return parts


def even_sizes(total, num_clients):
  """[N] sizes that sum to total and differ by at most one, larger first."""
  return total // num_clients + (np.arange(num_clients) < total % num_clients)


def lognormal_sizes(rng, total, num_clients, sigma):
  """[N] sizes >= 1 that sum to total, lognormal around total / N.

  Every client gets one example. The rest is split in proportion to
  exp(sigma Z), rounded down; clients with the largest fractions get one of the
  remainder each, where FedDyn's code gives all of it to one client.
  """
  weights = softmax(sigma * rng.standard_normal(num_clients))
  shares = weights * (total - num_clients)
  sizes = 1 + np.floor(shares).astype(np.int64)
  largest = np.argsort(np.floor(shares) - shares, kind='stable')
  sizes[largest[: total - sizes.sum()]] += 1
  return sizes


def assign_by_prior(rng, y, sizes, log_priors):
  """Fills clients of given sizes by sampling from their class priors.

  Repeats: a random client that is not full draws a class from its prior and
  takes an unused example of it. The prior is restricted to the classes with
  examples left, or uniform over these if its mass there is zero.

  Args:
    rng: Generator.
    y: [n] classes 0..C-1.
    sizes: [N] examples per client; their sum must not exceed n.
    log_priors: [N, C] log class probabilities up to a constant per row; -inf
      for probability zero.

  Returns:
    One int32 array per client, of the given sizes.
  """
  left = np.bincount(y, minlength=log_priors.shape[1]).tolist()
  needed = [int(size) for size in sizes]
  not_full = [client for client, size in enumerate(needed) if size]
  clients, classes = [], []
  edges = _restricted_edges(log_priors, left)
  # Plain lists and bisection: each of the n draws takes about 1 us.
  for pick, point in rng.random((sum(needed), 2)).tolist():
    place = int(pick * len(not_full))
    client = not_full[place]
    c = bisect.bisect_right(edges[client], point)
    clients.append(client)
    classes.append(c)
    left[c] -= 1
    needed[client] -= 1
    if not left[c] and any(left):
      edges = _restricted_edges(log_priors, left)
    if not needed[client]:
      not_full[place] = not_full[-1]
      not_full.pop()
  examples, classes = np.empty(len(clients), np.int64), np.array(classes)
  for c in range(len(left)):
    draws = np.flatnonzero(classes == c)
    members = rng.permutation(np.flatnonzero(y == c))
    examples[draws] = members[: len(draws)]
  return collect(rng, examples, np.array(clients), len(needed))


def _restricted_edges(log_priors, left):
  """Cumulative priors over the classes with examples left, per client.

  The edge of the last such class is exactly 1, above any draw in [0, 1).
  """
  available = np.asarray(left) > 0
  logits = np.where(available, log_priors, -np.inf)
  no_mass = np.isneginf(logits).all(axis=1, keepdims=True)
  logits = np.where(no_mass & available, 0.0, logits)
  edges = np.cumsum(softmax(logits), axis=1)
  return (edges / edges[:, -1:]).tolist()
