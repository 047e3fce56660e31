"""Partitions: assignments of the examples of a data set to clients.

Each partition is a pure NumPy function `(labels, num_clients, ..., *, seed) ->
list of disjoint int32 index arrays`, one array per client, in random order
unless the docstring says otherwise. `seed` affects the partition only, not
training. No client is empty.

"Dirichlet 0.5" has two meanings in papers. `dirichlet` draws, for each class,
its distribution over clients; client sizes vary widely. `dirichlet_balanced`
draws, for each client, its distribution over classes; client sizes are fixed.
Results differ by an order of magnitude, so state which one was used.
`file` reads a partition from a file.
"""

from collections.abc import Sequence
import functools
from typing import Any

import numpy as np

from fedjax_het import names
from fedjax_het.data import assignment
from fedjax_het.data.partition_file import by_file
from fedjax_het.options import at_least, check_call, not_negative, positive


def partition(
    labels: Sequence[int] | np.ndarray,
    num_clients: int,
    *,
    name: str = 'dirichlet',
    seed: int,
    **options: Any,
) -> list[np.ndarray]:
  """Assigns examples to clients by the partition `name` of `PARTITIONS`.

  Args:
    labels: [n] integers, the class of each example.
    num_clients: Number of clients, at most n.
    name: A key of `PARTITIONS`.
    seed: Integer >= 0, used by the partition only.
    **options: Keyword arguments of that partition.

  Returns:
    `num_clients` disjoint, non-empty int32 arrays of example indices.

  Raises:
    ValueError: If the name or an option is unknown, a value is out of range,
      or no such partition exists or was found.
  """
  names.check_name('partition', name, PARTITIONS)
  make = functools.partial(PARTITIONS[name], seed=seed)
  check_call(f'Partition {name!r}', make, options)
  return make(labels, num_clients, **options)


def iid(labels, num_clients, *, seed, shuffle=True):
  """Equal random parts; sizes differ by at most one (McMahan et al., 2017).

  Args:
    labels: [n] integers.
    num_clients: Number of clients N; the first n mod N get one extra example.
    seed: Integer >= 0; unused without `shuffle`.
    shuffle: False gives contiguous parts in file order, as FedHe's code does.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: For bad labels, num_clients or seed.
  """
  y, _, rng = assignment.prepare(labels, num_clients, seed)
  order = rng.permutation(len(y)) if shuffle else np.arange(len(y))
  return [part.astype(np.int32) for part in np.array_split(order, num_clients)]


def shards(labels, num_clients, *, seed, shards_per_client=2):
  """Sorts by label, cuts equal shards and assigns some to each client.

  A client holds at most `shards_per_client` classes if no shard crosses a
  class boundary; otherwise a shard may contain two classes or more.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    shards_per_client: Shards per client; N shards_per_client <= n.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If there are more shards than examples, or for bad arguments.

  References:
    McMahan et al., `Communication-Efficient Learning
    <https://arxiv.org/abs/1602.05629>`_, AISTATS 2017.
  """
  y, _, rng = assignment.prepare(labels, num_clients, seed)
  at_least(1, shards_per_client=shards_per_client)
  num_shards = num_clients * shards_per_client
  if num_shards > len(y):
    raise ValueError(
        f'{num_clients} clients of shards_per_client={shards_per_client} need '
        f'{num_shards} shards, more than the {len(y)} examples.'
    )
  owner = rng.permutation(num_shards) // shards_per_client
  return assignment.collect(
      rng,
      np.argsort(y, kind='stable'),
      np.repeat(owner, assignment.even_sizes(len(y), num_shards)),
      num_clients,
  )


def dirichlet(
    labels,
    num_clients,
    *,
    seed,
    alpha=0.5,
    min_size=10,
    cap=True,
    max_tries=1000,
):
  """Splits each class over clients by Dir(alpha); client sizes vary.

  For each class, draws p ~ Dir(alpha 1_N) and splits the n_c examples at
  floor(cumsum(p) n_c). The whole draw is repeated until every client holds
  `min_size` examples, so the result is conditioned on that event.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0; a small value gives skewed clients.
    min_size: Minimum client size (Yurochkin 10, FeDepth 50).
    cap: Whether a client that holds n / N examples gets none of the later
      classes. The original code and its derivatives do this; papers rarely
      state it. It makes client sizes more equal.
    max_tries: Maximum number of draws.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If `min_size` was not reached, or for bad arguments.

  References:
    Yurochkin et al., `Bayesian Nonparametric Federated Learning
    <https://arxiv.org/abs/1905.12022>`_, ICML 2019.
  """
  y, num_classes, rng = assignment.prepare(labels, num_clients, seed)
  positive(alpha=alpha)
  totals = np.bincount(y, minlength=num_classes)

  def draw():
    counts = np.zeros((num_clients, num_classes), np.int64)
    sizes = np.zeros(num_clients, np.int64)
    for c, total in enumerate(totals):
      weights = assignment.log_dirichlet(rng, alpha, num_clients)
      if cap:
        weights[sizes * num_clients >= len(y)] = -np.inf
      counts[:, c] = assignment.apportion(assignment.softmax(weights), total)
      sizes += counts[:, c]
    return counts

  counts = assignment.draw_until(
      draw,
      min_size,
      max_tries,
      len(y),
      num_clients,
      f'dirichlet(alpha={alpha})',
  )
  return assignment.assign_counts(rng, y, counts)


def dirichlet_balanced(labels, num_clients, *, seed, alpha=0.5, sigma=0.0):
  """Draws a class prior q_k ~ Dir(alpha 1_C) per client; sizes are fixed.

  Repeats until no example is left: a random client that is not full draws a
  class from its prior, restricted to classes with examples left, and takes one
  example of it. Late draws deviate from the prior as classes run out.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0 of a client's class prior.
    sigma: 0 for sizes that differ by at most one; otherwise sizes are
      lognormal around n / N, and sigma is the standard deviation of log size.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: For bad arguments.

  References:
    Acar et al., `FedDyn <https://arxiv.org/abs/2111.04263>`_, ICLR 2021
    (code; its retry loop can hang once a client's classes are exhausted).
  """
  y, num_classes, rng = assignment.prepare(labels, num_clients, seed)
  positive(alpha=alpha)
  not_negative(sigma=sigma)
  sizes = assignment.even_sizes(len(y), num_clients)
  if sigma:
    sizes = assignment.lognormal_sizes(rng, len(y), num_clients, sigma)
  log_priors = assignment.log_dirichlet(rng, alpha, (num_clients, num_classes))
  return assignment.assign_by_prior(rng, y, sizes, log_priors)


def dirichlet_fedagm(labels, num_clients, *, seed, alpha=0.5):
  """The variant of `dirichlet_balanced` in FedAGM's code (used by FeDepth).

  Clients draw in order of their ids. Client k samples its n / N examples
  without replacement from all that are left; the weight of an example of class
  c is q_k[c]. So the number of remaining examples of a class matters, too.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0 of a client's class prior.

  Returns:
    N disjoint int32 arrays that cover all examples; sizes differ by at most
    one.

  Raises:
    ValueError: For bad arguments.

  References:
    Kim et al., `FedAGM <https://arxiv.org/abs/2201.03172>`_, 2022.
  """
  y, num_classes, rng = assignment.prepare(labels, num_clients, seed)
  positive(alpha=alpha)
  log_priors = assignment.log_dirichlet(rng, alpha, (num_clients, num_classes))
  left = rng.permutation(len(y))
  parts = []
  sizes = assignment.even_sizes(len(y), num_clients)
  for size, log_prior in zip(sizes, log_priors, strict=True):
    # Gumbel top-k: weighted sampling without replacement.
    score = log_prior[y[left]] + rng.gumbel(size=len(left))
    chosen = np.argsort(-score, kind='stable')[:size]
    parts.append(left[chosen].astype(np.int32))
    left = np.delete(left, chosen)
  return parts


def beta(
    labels,
    num_clients,
    *,
    seed,
    labels_per_client=2,
    share_alpha: float | None = None,
):
  """Assigns `labels_per_client` classes to each client (the beta partition).

  Concatenates random permutations of the classes. Client k owns entries
  k labels_per_client to (k + 1) labels_per_client - 1. Each class is divided
  among its owners. A client owns exactly `labels_per_client` classes if that
  number divides C. Otherwise its entries may span two permutations and contain
  a class twice; it then gets two shares of that class.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    labels_per_client: Classes per client, at most C;
      N labels_per_client >= C.
    share_alpha: None for equal shares of a class; else shares are drawn from
      Dir(share_alpha) (1 is SplitMix's uneven partition).

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If a class would have no owner, or for bad arguments.

  References:
    Hong et al., `SplitMix <https://arxiv.org/abs/2203.09747>`_, ICLR 2022;
    the beta(Lambda) of FeDepth.
  """
  y, num_classes, rng = assignment.prepare(labels, num_clients, seed)
  if share_alpha is not None:
    positive(share_alpha=share_alpha)
  num_assigned = assignment.check_num_assigned(
      num_clients, labels_per_client, num_classes
  )
  num_orders = -(-num_assigned // num_classes)
  orders = [rng.permutation(num_classes) for _ in range(num_orders)]
  classes = np.concatenate(orders)[:num_assigned]
  owner = np.arange(num_assigned) // labels_per_client
  return assignment.assign_classes(
      rng, y, classes, owner, num_clients, share_alpha
  )


def beta_heterofl(labels, num_clients, *, seed, labels_per_client=2):
  """HeteroFL's variant of `beta`: drops a client's repeated classes.

  Cuts each class into N labels_per_client / C shards, permutes the shards and
  gives each client `labels_per_client` of them. If a client gets a class
  twice, its second shard is dropped with its examples. With 2 labels per
  client, C = 10 and N = 100, clients hold 1.90 classes on average and 4.8 % of
  the examples have no owner.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    labels_per_client: Shards per client, at most C. If N labels_per_client is
      not a multiple of C, random classes are cut into one shard more.

  Returns:
    N disjoint int32 arrays.

  Raises:
    ValueError: If a class would have no owner, or for bad arguments.

  References:
    Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
  """
  y, num_classes, rng = assignment.prepare(labels, num_clients, seed)
  num_assigned = assignment.check_num_assigned(
      num_clients, labels_per_client, num_classes
  )
  classes = rng.permutation(
      np.resize(rng.permutation(num_classes), num_assigned)
  ).reshape(num_clients, labels_per_client)
  owner = np.repeat(np.arange(num_clients), labels_per_client)
  repeated = [
      c in row[:place] for row in classes for place, c in enumerate(row)
  ]
  owner[repeated] = assignment.NO_OWNER
  return assignment.assign_classes(
      rng, y, classes.ravel(), owner, num_clients
  )


def label_count(labels, num_clients, *, seed, labels_per_client=2):
  """NIID-Bench's "#label = Lambda" partition; client sizes are unequal.

  Client i owns class i mod C and `labels_per_client - 1` random others. A
  class is divided evenly among its owners. A class without an owner (possible
  if N < C) is not used.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    labels_per_client: Classes per client, at most C.

  Returns:
    N disjoint int32 arrays.

  Raises:
    ValueError: For bad arguments.

  References:
    Li et al., `Federated Learning on Non-IID Data Silos
    <https://arxiv.org/abs/2102.02079>`_, ICDE 2022.
  """
  y, num_classes, rng = assignment.prepare(labels, num_clients, seed)
  assignment.check_labels_per_client(labels_per_client, num_classes)
  classes = []
  for client in range(num_clients):
    first = client % num_classes
    others = np.delete(np.arange(num_classes), first)
    drawn = rng.choice(others, labels_per_client - 1, replace=False)
    classes.extend([first, *drawn])
  owner = np.repeat(np.arange(num_clients), labels_per_client)
  return assignment.assign_classes(
      rng, y, np.array(classes), owner, num_clients
  )


def quantity(
    labels, num_clients, *, seed, alpha=0.5, min_size=10, max_tries=1000
):
  """Random subsets with Dirichlet sizes: quantity skew without label skew.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0 of the sizes, Dir(alpha 1_N).
    min_size: Minimum client size.
    max_tries: Maximum number of draws.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If `min_size` was not reached, or for bad arguments.

  References:
    Li et al., `Federated Learning on Non-IID Data Silos
    <https://arxiv.org/abs/2102.02079>`_, ICDE 2022.
  """
  y, _, rng = assignment.prepare(labels, num_clients, seed)
  positive(alpha=alpha)

  def draw():
    weights = assignment.log_dirichlet(rng, alpha, num_clients)
    return assignment.apportion(assignment.softmax(weights), len(y))[:, None]

  counts = assignment.draw_until(
      draw, min_size, max_tries, len(y), num_clients, f'quantity(alpha={alpha})'
  )
  return assignment.assign_counts(rng, np.zeros_like(y), counts)


PARTITIONS = {
    'iid': iid,
    'shards': shards,
    'dirichlet': dirichlet,
    'dirichlet_balanced': dirichlet_balanced,
    'dirichlet_fedagm': dirichlet_fedagm,
    'beta': beta,
    'beta_heterofl': beta_heterofl,
    'label_count': label_count,
    'quantity': quantity,
    'file': by_file,
}
