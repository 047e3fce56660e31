"""How the examples of a data set are dealt to clients.

Every form is a pure host function `(labels, num_clients, ..., *, seed) ->
list of disjoint int32 index arrays`, one array per client, in random order
unless the docstring says otherwise. `seed` belongs to the partition alone: it
is not the seed of training. No form returns an empty client.

"Dirichlet 0.5" in a paper means one of two things whose results differ by an
order of magnitude: `dirichlet` draws for each class how it spreads over the
clients (sizes vary widely), `dirichlet_balanced` draws for each client its mix
of classes (sizes are fixed). State which one a result used.
"""

import inspect

import numpy as np

from fedjax_het import names
from fedjax_het.data import dealing


def partition(labels, num_clients, *, name='dirichlet', seed, **options):
  """Deals examples to clients by the form `name` of `PARTITIONS`.

  Args:
    labels: [n] integers, the class of each example.
    num_clients: Number of clients, at most n.
    name: A key of `PARTITIONS`.
    seed: Integer >= 0, of the partition only.
    **options: Keyword arguments of that form.

  Returns:
    `num_clients` disjoint, non-empty int32 arrays of example indices.

  Raises:
    ValueError: If the name or an option is unknown, a value is out of its
      range, or the form cannot be satisfied.
  """
  names.check_name('partition', name, PARTITIONS)
  parameters = list(inspect.signature(PARTITIONS[name]).parameters)
  known = [p for p in parameters if p not in ('labels', 'num_clients', 'seed')]
  for option in options:
    if option not in known:
      raise ValueError(
          f'Partition {name!r} has no option {option!r}'
          f'{names.suggest(option, known, "it takes")}'
      )
  return PARTITIONS[name](labels, num_clients, seed=seed, **options)


def iid(labels, num_clients, *, seed, shuffle=True):
  """Equal random parts; sizes differ by at most one (McMahan et al., 2017).

  Args:
    labels: [n] integers.
    num_clients: Number of clients N; the first n mod N get one example more.
    seed: Integer >= 0; unused without `shuffle`.
    shuffle: False gives contiguous parts in file order, as FedHe's code does.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: For bad labels, num_clients or seed.
  """
  y, _, rng = dealing.prepare(labels, num_clients, seed)
  order = rng.permutation(len(y)) if shuffle else np.arange(len(y))
  return [part.astype(np.int32) for part in np.array_split(order, num_clients)]


def shards(labels, num_clients, *, seed, shards_per_client=2):
  """Sorts by label, cuts equal shards, gives each client some of them.

  A client sees at most `shards_per_client` classes where shards divide
  classes; else a shard may straddle two.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    shards_per_client: Shards of one client; N times it must not exceed n.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If there are more shards than examples, or for bad arguments.

  References:
    McMahan et al., `Communication-Efficient Learning
    <https://arxiv.org/abs/1602.05629>`_, AISTATS 2017.
  """
  y, _, rng = dealing.prepare(labels, num_clients, seed)
  dealing.check_count('shards_per_client', shards_per_client)
  num_shards = num_clients * shards_per_client
  if num_shards > len(y):
    raise ValueError(
        f'{num_clients} clients of shards_per_client={shards_per_client} need '
        f'{num_shards} shards, more than the {len(y)} examples.'
    )
  owner = rng.permutation(num_shards) // shards_per_client
  return dealing.collect(
      rng,
      np.argsort(y, kind='stable'),
      np.repeat(owner, dealing.even_sizes(len(y), num_shards)),
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
  """Spreads each class over the clients by Dir(alpha); sizes vary.

  For every class p ~ Dir(alpha 1_N) and the class is cut at
  floor(cumsum(p) n_c); the whole draw is repeated until every client holds
  `min_size` examples. This conditions the distribution.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0; small is skewed.
    min_size: Smallest client allowed (Yurochkin 10, FeDepth 50).
    cap: Whether clients that already hold n / N examples get nothing of the
      next classes, as in the original code and its descendants, though rarely
      in the papers. It compresses the sizes.
    max_tries: Draws before giving up.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If `min_size` was not reached, or for bad arguments.

  References:
    Yurochkin et al., `Bayesian Nonparametric Federated Learning
    <https://arxiv.org/abs/1905.12022>`_, ICML 2019.
  """
  y, num_classes, rng = dealing.prepare(labels, num_clients, seed)
  dealing.check_real('alpha', alpha, above_zero=True)
  totals = np.bincount(y, minlength=num_classes)

  def draw():
    counts = np.zeros((num_clients, num_classes), np.int64)
    sizes = np.zeros(num_clients, np.int64)
    for c, total in enumerate(totals):
      weights = dealing.log_dirichlet(rng, alpha, num_clients)
      if cap:
        weights[sizes * num_clients >= len(y)] = -np.inf
      counts[:, c] = dealing.apportion(dealing.softmax(weights), total)
      sizes += counts[:, c]
    return counts

  counts = dealing.draw_until(
      draw,
      min_size,
      max_tries,
      len(y),
      num_clients,
      f'dirichlet(alpha={alpha})',
  )
  return dealing.take(rng, y, counts)


def dirichlet_balanced(labels, num_clients, *, seed, alpha=0.5, sigma=0.0):
  """Gives each client one class prior q_k ~ Dir(alpha 1_C); sizes are fixed.

  A random client with open demand draws a class from its prior, restricted to
  the classes that have examples left, and takes one; until all are taken. The
  class totals force late draws away from their prior.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0 of a client's class prior.
    sigma: 0 for sizes that differ by at most one; else the standard deviation
      of the logarithm of the sizes, lognormal around n / N.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: For bad arguments.

  References:
    Acar et al., `FedDyn <https://arxiv.org/abs/2111.04263>`_, ICLR 2021
    (code; its retry loop can hang once a client's classes are exhausted).
  """
  y, num_classes, rng = dealing.prepare(labels, num_clients, seed)
  dealing.check_real('alpha', alpha, above_zero=True)
  dealing.check_real('sigma', sigma, above_zero=False)
  sizes = dealing.even_sizes(len(y), num_clients)
  if sigma:
    sizes = dealing.lognormal_sizes(rng, len(y), num_clients, sigma)
  log_priors = dealing.log_dirichlet(rng, alpha, (num_clients, num_classes))
  return dealing.deal_by_prior(rng, y, sizes, log_priors)


def dirichlet_fedagm(labels, num_clients, *, seed, alpha=0.5):
  """`dirichlet_balanced` as FedAGM's code draws it (used by FeDepth).

  Clients in order: client k draws its n / N examples at once, without
  replacement, among all that are left, an example's weight being q_k of its
  class. So the number left of a class matters as well as the prior.

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
  y, num_classes, rng = dealing.prepare(labels, num_clients, seed)
  dealing.check_real('alpha', alpha, above_zero=True)
  log_priors = dealing.log_dirichlet(rng, alpha, (num_clients, num_classes))
  left = rng.permutation(len(y))
  parts = []
  sizes = dealing.even_sizes(len(y), num_clients)
  for size, log_prior in zip(sizes, log_priors, strict=True):
    # The largest of log weight + Gumbel noise: successive weighted draws.
    score = log_prior[y[left]] + rng.gumbel(size=len(left))
    chosen = np.argsort(-score, kind='stable')[:size]
    parts.append(left[chosen].astype(np.int32))
    left = np.delete(left, chosen)
  return parts


def beta(labels, num_clients, *, seed, labels_per_client=2, share_alpha=None):
  """Deals classes like cards, `labels_per_client` to each client.

  A shuffled deck of all classes is dealt, and reshuffled when empty; each
  class is divided among its cards. Where `labels_per_client` divides the
  number of classes, every client has exactly that many; else a hand may
  straddle two decks and hold one card twice, which counts as a double share.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    labels_per_client: Cards of one client, at most the number of classes;
      N times it must reach the number of classes.
    share_alpha: None for equal shares of a class, else shares ~ Dir of it
      (SplitMix's uneven form is 1).

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If a class would have no owner, or for bad arguments.

  References:
    Hong et al., `SplitMix <https://arxiv.org/abs/2203.09747>`_, ICLR 2022;
    the beta(Lambda) of FeDepth.
  """
  y, num_classes, rng = dealing.prepare(labels, num_clients, seed)
  if share_alpha is not None:
    dealing.check_real('share_alpha', share_alpha, above_zero=True)
  num_cards = dealing.check_cards(num_clients, labels_per_client, num_classes)
  num_decks = -(-num_cards // num_classes)
  deck = [rng.permutation(num_classes) for _ in range(num_decks)]
  cards = np.concatenate(deck)[:num_cards]
  owner = np.arange(num_cards) // labels_per_client
  return dealing.deal_cards(rng, y, cards, owner, num_clients, share_alpha)


def beta_heterofl(labels, num_clients, *, seed, labels_per_client=2):
  """HeteroFL's form of `beta`: repeated labels of a client lose their share.

  Each class is cut into N labels_per_client / C shards, the labels of all
  shards are permuted, and each client takes a row of them. The second shard of
  one class in a row is dropped with its data: clients then hold fewer classes
  (1.90 of 2, C = 10, N = 100) and some examples have no owner (4.9 %).

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    labels_per_client: Length of a client's row, at most the number of classes.
      Where N times it is no multiple of C, random classes get one shard more.

  Returns:
    N disjoint int32 arrays.

  Raises:
    ValueError: If a class would have no owner, or for bad arguments.

  References:
    Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
  """
  y, num_classes, rng = dealing.prepare(labels, num_clients, seed)
  num_cards = dealing.check_cards(num_clients, labels_per_client, num_classes)
  cards = rng.permutation(
      np.resize(rng.permutation(num_classes), num_cards)
  ).reshape(num_clients, labels_per_client)
  owner = np.repeat(np.arange(num_clients), labels_per_client)
  repeated = [
      card in row[:place] for row in cards for place, card in enumerate(row)
  ]
  owner[repeated] = dealing.NOBODY
  return dealing.deal_cards(rng, y, cards.ravel(), owner, num_clients)


def label_count(labels, num_clients, *, seed, labels_per_client=2):
  """NIID-Bench's "#label = Lambda" form; sizes are unequal.

  Client i gets class i mod C and others at random; a class is divided evenly
  among those who hold it. A class that nobody drew (N < C) stays unused.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    labels_per_client: Classes of every client, at most the number of classes.

  Returns:
    N disjoint int32 arrays.

  Raises:
    ValueError: For bad arguments.

  References:
    Li et al., `Federated Learning on Non-IID Data Silos
    <https://arxiv.org/abs/2102.02079>`_, ICDE 2022.
  """
  y, num_classes, rng = dealing.prepare(labels, num_clients, seed)
  dealing.check_labels_per_client(labels_per_client, num_classes)
  cards = []
  for client in range(num_clients):
    first = client % num_classes
    others = np.delete(np.arange(num_classes), first)
    drawn = rng.choice(others, labels_per_client - 1, replace=False)
    cards.extend([first, *drawn])
  owner = np.repeat(np.arange(num_clients), labels_per_client)
  return dealing.deal_cards(rng, y, np.array(cards), owner, num_clients)


def quantity(
    labels, num_clients, *, seed, alpha=0.5, min_size=10, max_tries=1000
):
  """Random parts of Dirichlet sizes: the amount differs, not the label mix.

  Args:
    labels: [n] integers.
    num_clients: Number of clients N.
    seed: Integer >= 0.
    alpha: Concentration > 0 of the sizes, Dir(alpha 1_N).
    min_size: Smallest client allowed.
    max_tries: Draws before giving up.

  Returns:
    N disjoint int32 arrays that cover all examples.

  Raises:
    ValueError: If `min_size` was not reached, or for bad arguments.

  References:
    Li et al., `Federated Learning on Non-IID Data Silos
    <https://arxiv.org/abs/2102.02079>`_, ICDE 2022.
  """
  y, _, rng = dealing.prepare(labels, num_clients, seed)
  dealing.check_real('alpha', alpha, above_zero=True)

  def draw():
    shares = dealing.softmax(dealing.log_dirichlet(rng, alpha, num_clients))
    return dealing.apportion(shares, len(y))[:, None]

  counts = dealing.draw_until(
      draw, min_size, max_tries, len(y), num_clients, f'quantity(alpha={alpha})'
  )
  return dealing.take(rng, np.zeros_like(y), counts)


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
}
