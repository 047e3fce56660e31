"""Checks every partition: owners, client sizes and class distributions."""

import numpy as np
import pytest

from fedjax_het.data import assignment
from fedjax_het.data import partition as forms

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
# Uneven classes, and a size that is not a multiple of ten clients.
UNEVEN = np.random.default_rng(0).choice(7, 1437, p=np.arange(1, 8) / 28)
DRAWN = sorted(set(forms.PARTITIONS) - {'file'})
COVERING = sorted(set(DRAWN) - {'beta_heterofl'})


def histograms(labels, parts):
  """[N, C] number of examples of each class on each client."""
  num_classes = labels.max() + 1
  return np.stack(
      [np.bincount(labels[p], minlength=num_classes) for p in parts]
  )


def mixing(labels, parts):
  """Mean number of classes and mean share of the largest class per client."""
  counts = histograms(labels, parts)
  largest = counts.max(axis=1) / counts.sum(axis=1)
  return (counts > 0).sum(axis=1).mean(), largest.mean()


def sizes(parts):
  return np.array([len(part) for part in parts])


@pytest.mark.parametrize('labels', [CIFAR10, UNEVEN], ids=['even', 'uneven'])
@pytest.mark.parametrize('name', DRAWN)
def test_owners_are_disjoint_and_the_seed_decides(name, labels):
  num_clients = 10
  parts = forms.partition(labels, num_clients, name=name, seed=3)
  assert len(parts) == num_clients and sizes(parts).min() > 0
  assert all(part.dtype == np.int32 and part.ndim == 1 for part in parts)
  owned = np.concatenate(parts)
  assert len(np.unique(owned)) == len(owned)
  assert owned.min() >= 0 and owned.max() < len(labels)
  if name in COVERING:
    assert len(owned) == len(labels)
  again = forms.partition(labels, num_clients, name=name, seed=3)
  for part, same in zip(parts, again, strict=True):
    np.testing.assert_array_equal(part, same)
  other = forms.partition(labels, num_clients, name=name, seed=4)
  assert any(
      not np.array_equal(p, q) for p, q in zip(parts, other, strict=True)
  )


@pytest.mark.parametrize('name', DRAWN)
def test_examples_of_a_client_come_in_random_order(name):
  part = forms.partition(CIFAR10, 10, name=name, seed=0)[0]
  ascending = np.mean(np.diff(part) > 0)
  np.testing.assert_allclose(ascending, 0.5, atol=0.05)


@pytest.mark.parametrize('name', DRAWN)
def test_the_names_of_the_classes_do_not_matter(name):
  renamed = np.array([3, 30, 300, -1, 7, 8, 9])[UNEVEN]
  order = np.argsort([3, 30, 300, -1, 7, 8, 9]).argsort()
  parts = forms.partition(order[UNEVEN], 10, name=name, seed=0)
  same = forms.partition(renamed, 10, name=name, seed=0)
  for part, other in zip(parts, same, strict=True):
    np.testing.assert_array_equal(part, other)


def test_iid_sizes_differ_by_at_most_one():
  assert sizes(forms.iid(np.zeros(10, int), 3, seed=0)).tolist() == [4, 3, 3]


def test_iid_without_shuffle_is_contiguous():
  parts = forms.iid(np.zeros(10, int), 3, seed=0, shuffle=False)
  assert [part.tolist() for part in parts] == [
      [0, 1, 2, 3],
      [4, 5, 6],
      [7, 8, 9],
  ]


def test_shards_of_mnist():
  labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
  parts = forms.shards(labels, 100, seed=0)
  assert set(sizes(parts)) == {600}
  held = (histograms(labels, parts) > 0).sum(axis=1)
  assert held.max() == 2 and held.min() == 1


@pytest.mark.parametrize(
    'form, alpha, num_classes, largest',
    [
        (forms.dirichlet_balanced, 0.1, 5.8, 0.61),
        (forms.dirichlet_balanced, 0.3, 8.1, 0.44),
        (forms.dirichlet_balanced, 0.5, 9.2, 0.36),
        (forms.dirichlet_balanced, 1.0, 9.9, 0.28),
        (forms.dirichlet_fedagm, 0.1, 4.9, 0.65),
        (forms.dirichlet_fedagm, 0.3, 7.9, 0.45),
        (forms.dirichlet_fedagm, 0.5, 9.1, 0.39),
        (forms.dirichlet_fedagm, 1.0, 9.8, 0.29),
    ],
)
def test_balanced_dirichlet_mixes_ten_classes(
    form, alpha, num_classes, largest
):
  draws = [form(CIFAR10, 100, seed=seed, alpha=alpha) for seed in (1, 2, 3)]
  assert all(set(sizes(parts)) == {500} for parts in draws)
  got = np.mean([mixing(CIFAR10, parts) for parts in draws], axis=0)
  np.testing.assert_allclose(got[0], num_classes, atol=0.4)
  np.testing.assert_allclose(got[1], largest, atol=0.04)


@pytest.mark.parametrize(
    'alpha, num_classes, largest', [(0.3, 58, 0.10), (1.0, 83, 0.055)]
)
def test_balanced_dirichlet_mixes_a_hundred_classes(
    alpha, num_classes, largest
):
  parts = forms.dirichlet_balanced(CIFAR100, 100, seed=1, alpha=alpha)
  assert set(sizes(parts)) == {500}
  got = mixing(CIFAR100, parts)
  np.testing.assert_allclose(got[0], num_classes, atol=2)
  np.testing.assert_allclose(got[1], largest, atol=0.01)


@pytest.mark.parametrize(
    'alpha, largest', [(0.1, 0.664), (0.3, 0.463), (0.5, 0.380), (1.0, 0.293)]
)
def test_priors_have_the_largest_share_of_a_dirichlet_draw(alpha, largest):
  rng = np.random.default_rng(0)
  priors = assignment.softmax(assignment.log_dirichlet(rng, alpha, (20000, 10)))
  np.testing.assert_allclose(priors.sum(axis=1), 1.0)
  np.testing.assert_allclose(priors.max(axis=1).mean(), largest, atol=0.004)
  # Var p = (1/C)(1 - 1/C) / (C alpha + 1).
  np.testing.assert_allclose(
      priors.var(axis=0).mean(), 0.09 / (10 * alpha + 1), rtol=0.03
  )


@pytest.mark.parametrize(
    'form', [forms.dirichlet_balanced, forms.dirichlet_fedagm]
)
def test_balanced_dirichlet_at_its_limits(form):
  even = histograms(CIFAR10, form(CIFAR10, 100, seed=0, alpha=1e6))
  np.testing.assert_allclose(even.mean(axis=0), 50)
  # Binomial(500, 0.1) has a standard deviation of 6.7; 40 is six of them.
  assert np.abs(even - 50).max() < 40
  skewed = histograms(CIFAR10, form(CIFAR10, 100, seed=0, alpha=1e-3))
  largest = skewed.max(axis=1) / 500
  # If more than N / C clients prefer a class, it runs out and they get other
  # classes too; the others have nearly one class.
  assert np.mean(largest > 0.7) > 0.8
  assert np.mean(largest > 0.9) > 0.25
  assert largest.min() > 0.35


def test_a_tiny_alpha_does_not_underflow():
  for name in ('dirichlet_balanced', 'dirichlet_fedagm'):
    parts = forms.partition(UNEVEN, 10, name=name, seed=0, alpha=1e-12)
    assert sizes(parts).sum() == len(UNEVEN)


def test_lognormal_sizes():
  parts = forms.dirichlet_balanced(CIFAR10, 100, seed=0, sigma=0.3)
  assert sizes(parts).sum() == 50000
  assert 0.2 < np.log(sizes(parts)).std() < 0.4
  for seed in range(20):
    rng = np.random.default_rng(seed)
    drawn = assignment.lognormal_sizes(rng, 120, 100, 3.0)
    assert drawn.sum() == 120 and drawn.min() >= 1
  # No client gets all that rounding down leaves.
  for seed in range(5):
    rng = np.random.default_rng(seed)
    drawn = assignment.lognormal_sizes(rng, 50_000, 1000, 0.1)
    assert drawn.sum() == 50_000 and drawn.max() < 50 * np.exp(0.5)


def test_exhausted_priors_still_fill_every_client():
  labels = np.repeat([0, 1], 4)
  log_priors = np.array([[0.0, -np.inf], [0.0, -np.inf]])
  rng = np.random.default_rng(0)
  parts = assignment.assign_by_prior(rng, labels, [4, 4], log_priors)
  assert sizes(parts).tolist() == [4, 4]
  assert sorted(np.concatenate(parts).tolist()) == list(range(8))


def test_priors_are_obeyed_where_they_can_be():
  log_priors = np.log(np.eye(2) + 1e-300)
  rng = np.random.default_rng(0)
  labels = np.repeat([0, 1], 4)
  parts = assignment.assign_by_prior(rng, labels, [4, 4], log_priors)
  assert sorted(parts[0].tolist()) == [0, 1, 2, 3]
  assert sorted(parts[1].tolist()) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    'labels, alpha, low, high, num_classes',
    [
        (CIFAR10, 0.3, 143, 190, 7.0),
        (CIFAR10, 0.5, 110, 140, 8.1),
        (CIFAR10, 1.0, 69, 99, 9.0),
        (CIFAR100, 0.3, 29, 38, None),
        (CIFAR100, 1.0, 14.5, 20.7, None),
    ],
)
def test_sizes_of_the_capped_dirichlet(labels, alpha, low, high, num_classes):
  draws = [
      forms.dirichlet(labels, 100, seed=seed, alpha=alpha, min_size=50)
      for seed in range(5)
  ]
  assert min(sizes(parts).min() for parts in draws) >= 50
  # Training sizes after a validation split of 20 %.
  spread = np.mean([np.std(0.8 * sizes(parts)) for parts in draws])
  assert low <= spread <= high
  if num_classes:
    got = np.mean([mixing(labels, parts)[0] for parts in draws])
    np.testing.assert_allclose(got, num_classes, atol=0.25)


def test_the_cap_compresses_sizes():
  spread = [
      np.std(
          0.8 * sizes(forms.dirichlet(CIFAR10, 100, seed=0, alpha=0.3, cap=c))
      )
      for c in (True, False)
  ]
  assert spread[0] < 190 < 205 < spread[1]


def test_dirichlet_evens_out():
  parts = forms.dirichlet(CIFAR10, 100, seed=0, alpha=1e6, cap=False)
  np.testing.assert_allclose(histograms(CIFAR10, parts), 50, atol=2)


def test_beta_assigns_two_classes_to_each():
  parts = forms.beta(CIFAR10, 100, seed=0, labels_per_client=2)
  counts = histograms(CIFAR10, parts)
  assert set(counts.ravel()) == {0, 250}
  assert ((counts > 0).sum(axis=1) == 2).all()
  assert ((counts > 0).sum(axis=0) == 20).all()
  assert set(sizes(parts)) == {500}


def test_beta_assigns_ten_of_a_hundred_classes():
  parts = forms.beta(CIFAR100, 100, seed=0, labels_per_client=10)
  assert ((histograms(CIFAR100, parts) > 0).sum(axis=1) == 10).all()
  assert set(sizes(parts)) == {500}


def test_beta_straddling_decks_gives_double_shares():
  draws = [
      forms.beta(CIFAR100, 100, seed=seed, labels_per_client=30)
      for seed in range(4)
  ]
  held = [(histograms(CIFAR100, p) > 0).sum(axis=1) for p in draws]
  np.testing.assert_allclose(np.mean(held), 29.6, atol=0.15)
  assert 20 <= np.min(held) < 30
  # 500 / 30 is no integer, so each of the 30 shares is rounded up or down.
  assert all(np.abs(sizes(p) - 500).max() <= 15 for p in draws)
  assert all(sizes(p).sum() == 50000 for p in draws)


def test_beta_with_uneven_shares():
  parts = forms.beta(CIFAR10, 100, seed=0, share_alpha=1.0)
  assert ((histograms(CIFAR10, parts) > 0).sum(axis=1) <= 2).all()
  assert sizes(parts).sum() == 50000 and sizes(parts).std() > 100


@pytest.mark.parametrize(
    'labels, per_client, shards, distinct, unused',
    [
        (CIFAR10, 2, {250}, 1.90, 0.049),
        (CIFAR10, 5, {100}, 4.11, 0.177),
        (CIFAR100, 10, {50}, 9.60, 0.040),
        (CIFAR100, 30, {16, 17}, 26.1, 0.129),
    ],
)
def test_heterofl_rows_lose_their_repeats(
    labels, per_client, shards, distinct, unused
):
  draws = [
      forms.beta_heterofl(labels, 100, seed=seed, labels_per_client=per_client)
      for seed in range(20)
  ]
  counts = np.stack([histograms(labels, parts) for parts in draws])
  assert set(counts[counts > 0].tolist()) == shards
  tolerance = 0.05 if labels is CIFAR10 else 0.15
  np.testing.assert_allclose(
      (counts > 0).sum(axis=2).mean(), distinct, atol=tolerance
  )
  np.testing.assert_allclose(
      1 - counts.sum(axis=(1, 2)).mean() / 50000, unused, atol=0.01
  )


def test_label_count_of_niid_bench():
  parts = forms.label_count(CIFAR10, 20, seed=0, labels_per_client=3)
  counts = histograms(CIFAR10, parts)
  assert ((counts > 0).sum(axis=1) == 3).all()
  assert all(counts[client, client % 10] > 0 for client in range(20))
  for column in counts.T:
    held = column[column > 0]
    assert held.sum() == 5000 and held.max() - held.min() <= 1


def test_quantity_changes_sizes_not_the_mix():
  parts = forms.quantity(CIFAR10, 10, seed=0, alpha=0.5, min_size=10)
  assert sizes(parts).std() > 1000
  counts = histograms(CIFAR10, parts)[sizes(parts) > 2000]
  shares = counts / counts.sum(axis=1, keepdims=True)
  np.testing.assert_allclose(shares, 0.1, atol=0.03)


@pytest.mark.parametrize(
    'name, options, message',
    [
        ('dirichlet', dict(alpha=0.0), 'alpha must be above 0, got 0.0'),
        ('dirichlet', dict(alpha=float('nan')), 'alpha must be .* got nan'),
        ('dirichlet_balanced', dict(alpha=-1), 'alpha must be above 0, got -1'),
        ('dirichlet_balanced', dict(sigma=-1), 'sigma must be at least 0'),
        ('dirichlet_fedagm', dict(alpha='0.5'), "alpha must be .* got '0.5'"),
        ('quantity', dict(alpha=0), 'alpha must be'),
        ('dirichlet', dict(min_size=200), 'can be at most 143'),
        ('dirichlet', dict(min_size=0), 'min_size must be at least 1'),
        (
            'dirichlet',
            dict(alpha=0.01, min_size=140, max_tries=5),
            'no draw of 5 gave every client min_size=140 .*raise alpha',
        ),
        ('beta', dict(labels_per_client=8), '=8 is more than the 7 classes'),
        ('beta_heterofl', dict(labels_per_client=8), 'more than the 7 classes'),
        ('label_count', dict(labels_per_client=8), 'more than the 7 classes'),
        ('beta', dict(labels_per_client=0), 'must be at least 1'),
        ('beta', dict(share_alpha=0), 'share_alpha must be'),
        ('shards', dict(shards_per_client=144), '1440 shards, more than'),
        (
            'shards',
            dict(shard_per_client=2),
            "no option 'shard_per_client'.*'shards_per_client'",
        ),
        ('iid', dict(seed=-1), 'seed must be at least 0, got -1'),
        ('iid', dict(num_clients=1438), 'more than the 1437 examples'),
        ('iid', dict(num_clients=0), 'num_clients must be at least 1'),
        ('iid', dict(labels=UNEVEN * 1.0), 'vector of integers'),
        ('dirichle', {}, "Unknown partition 'dirichle'.* 'dirichlet'?"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(name, options, message):
  arguments = dict(labels=UNEVEN, num_clients=10, seed=0) | options
  with pytest.raises(ValueError, match=message) as error:
    forms.partition(name=name, **arguments)
  assert '\n' not in str(error.value)


def test_classes_without_an_owner_are_refused():
  with pytest.raises(ValueError, match='at most 6 of the 7 classes'):
    forms.beta(UNEVEN, 3, seed=0, labels_per_client=2)


def test_clients_without_an_example_are_refused():
  labels = np.array([0, 0, 0, 0, 1])
  with pytest.raises(ValueError, match='would get no example'):
    forms.label_count(labels, 4, seed=0, labels_per_client=1)
