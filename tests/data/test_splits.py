"""Checks validation splits, test splits and the assignment of groups."""

import numpy as np
import pytest

from fedjax_het.data import partition as forms
from fedjax_het.data import splits

LABELS = np.repeat(np.arange(10), 500)
TEST_LABELS = np.random.default_rng(1).permutation(
    np.repeat(np.arange(10), 100)
)


def histograms(labels, parts):
  return np.stack([np.bincount(labels[p], minlength=10) for p in parts])


@pytest.mark.parametrize('stratified', [False, True])
def test_validation_takes_a_fifth_of_every_client(stratified):
  parts = forms.iid(np.repeat(np.arange(10), 500), 10, seed=0)
  train, validation = splits.split_validation(
      parts, 0.2, seed=0, labels=LABELS if stratified else None
  )
  for part, kept, held_out in zip(parts, train, validation, strict=True):
    assert len(kept) == 400 and len(held_out) == 100
    assert kept.dtype == held_out.dtype == np.int32
    both = np.concatenate([kept, held_out])
    np.testing.assert_array_equal(np.sort(both), np.sort(part))


def test_validation_rounds_down():
  part = [np.arange(size, dtype=np.int32) for size in (1, 4, 5, 9, 100)]
  for fraction, want in ((0.2, [0, 0, 1, 1, 20]), (0.29, [0, 1, 1, 2, 29])):
    _, held_out = splits.split_validation(part, fraction, seed=0)
    assert [len(p) for p in held_out] == want
  _, none = splits.split_validation(part, 0.0, seed=0)
  assert sum(map(len, none)) == 0


def test_stratified_validation_keeps_the_class_shares():
  parts = forms.dirichlet(LABELS, 10, seed=0, alpha=0.5)
  _, held_out = splits.split_validation(parts, 0.2, seed=0, labels=LABELS)
  exact = 0.2 * histograms(LABELS, parts)
  assert np.abs(histograms(LABELS, held_out) - exact).max() <= 1.0 + 0.2


def test_validation_of_a_client_depends_on_that_client_alone():
  parts = forms.iid(LABELS, 10, seed=0)
  _, all_clients = splits.split_validation(parts, 0.2, seed=5)
  _, first_two = splits.split_validation(parts[:2], 0.2, seed=5)
  for part, same in zip(all_clients[:2], first_two, strict=True):
    np.testing.assert_array_equal(part, same)
  _, other_seed = splits.split_validation(parts, 0.2, seed=6)
  assert not np.array_equal(all_clients[0], other_seed[0])


@pytest.mark.parametrize('fraction', [-0.1, 1.0, float('nan'), '0.2'])
def test_impossible_fractions_are_refused(fraction):
  with pytest.raises(ValueError, match='fraction must be'):
    splits.split_validation([np.arange(5)], fraction, seed=0)


@pytest.mark.parametrize('name', ['iid', 'dirichlet', 'beta', 'beta_heterofl'])
def test_the_test_set_is_divided_like_the_training_set(name):
  parts = forms.partition(LABELS, 10, name=name, seed=0)
  test_parts = splits.split_like(LABELS, parts, TEST_LABELS, seed=0)
  owned = np.concatenate(test_parts)
  assert sorted(owned.tolist()) == list(range(1000))
  counts = histograms(LABELS, parts)
  exact = 100 * counts / counts.sum(axis=0)
  got = histograms(TEST_LABELS, test_parts)
  assert np.abs(got - exact).max() < 1.0
  assert (got[counts == 0] == 0).all()
  again = splits.split_like(LABELS, parts, TEST_LABELS, seed=0)
  for part, same in zip(test_parts, again, strict=True):
    np.testing.assert_array_equal(part, same)


def test_test_classes_without_an_owner_are_left_out():
  parts = [np.arange(500), np.arange(500, 1000)]  # Classes 0 and 1.
  test_parts = splits.split_like(LABELS, parts, TEST_LABELS, seed=0)
  for c, part in enumerate(test_parts):
    assert part.dtype == np.int32
    np.testing.assert_array_equal(
        np.sort(part), np.flatnonzero(TEST_LABELS == c)
    )


def test_groups_are_contiguous_without_a_seed():
  assert splits.assign_groups({'a': 2, 'b': 1}) == ['a', 'a', 'b']


def test_groups_with_a_seed_are_a_permutation():
  counts = {'a': 50, 'b': 30, 'c': 20}
  group_of = splits.assign_groups(counts, seed=0)
  assert {name: group_of.count(name) for name in counts} == counts
  assert group_of != splits.assign_groups(counts)
  assert group_of == splits.assign_groups(counts, seed=0)
  assert group_of != splits.assign_groups(counts, seed=1)
  assert len(splits.assign_groups(counts, seed=2**40)) == len(group_of)


@pytest.mark.parametrize('seed', range(5))
def test_equal_seeds_assign_models_devices_and_labels_independently(seed):
  counts = {'a': 4, 'b': 4, 'c': 4}
  groups = splits.assign_groups(counts, seed)
  devices = splits.assign_devices(counts, seed)
  assert len({*zip(groups, devices, strict=True)}) > len(counts)
  # With one label a client, classes 0 to 3 were group a's, and so on.
  labels = np.repeat(np.arange(12), 5)
  parts = forms.beta(labels, 12, seed=seed, labels_per_client=1)
  of_client = [labels[part[0]] // 4 for part in parts]
  for other in (groups, devices):
    assert len({*zip(of_client, other, strict=True)}) > len(counts)


@pytest.mark.parametrize(
    'counts, seed, message',
    [
        ({}, None, 'hold no client'),
        ({'a': 0}, None, 'hold no client'),
        ({'a': -1}, 0, "group 'a' must be at least 0, got -1"),
        ({'a': 1.5}, 0, 'an integer, got 1.5'),
        ({'a': 1}, -3, 'seed must be'),
    ],
)
def test_bad_groups_are_refused(counts, seed, message):
  with pytest.raises(ValueError, match=message):
    splits.assign_groups(counts, seed)


@pytest.mark.parametrize('size', [1, 7, 500, 4999])
def test_a_public_set_keeps_the_class_shares_and_loses_nothing(size):
  public, rest = splits.split_public(LABELS, size, seed=0)
  assert len(public) == size
  assert public.dtype == rest.dtype == np.int32
  both = np.concatenate([public, rest])
  np.testing.assert_array_equal(np.sort(both), np.arange(len(LABELS)))
  counts = np.bincount(LABELS[public], minlength=10)
  assert np.abs(counts - size / 10).max() <= 1.0
  if size == 500:
    assert counts.tolist() == [50] * 10


def test_a_public_set_follows_its_seed_and_not_the_order_of_labels():
  first, _ = splits.split_public(LABELS, 100, seed=0)
  same, _ = splits.split_public(LABELS, 100, seed=0)
  other, _ = splits.split_public(LABELS, 100, seed=1)
  np.testing.assert_array_equal(first, same)
  assert not np.array_equal(first, other)
  skewed = np.repeat([0, 1], [900, 100])
  public, _ = splits.split_public(skewed, 100, seed=3)
  assert np.bincount(skewed[public]).tolist() == [90, 10]


@pytest.mark.parametrize('size', [0, 5000, 6000])
def test_impossible_public_sets_are_refused(size):
  with pytest.raises(ValueError, match='must hold between 1 and 4999'):
    splits.split_public(LABELS, size, seed=0)


@pytest.mark.parametrize('share', [0.0, 0.3])
def test_wrong_labels_are_so_many_and_of_every_other_class(share):
  labels = np.arange(3000, dtype=np.int32) % 3
  got = splits.with_wrong_labels(labels, share, 3, seed=4)
  assert got.dtype == labels.dtype and set(got) == {0, 1, 2}
  wrong = got != labels
  assert wrong.sum() == 3000 * share
  if share:
    # Each class loses to either other class about as often.
    pairs = np.bincount(3 * labels[wrong] + got[wrong], minlength=9)
    assert np.all(np.abs(pairs[[1, 2, 3, 5, 6, 7]] - 150) < 50)
    again = splits.with_wrong_labels(labels, share, 3, seed=4)
    np.testing.assert_array_equal(again, got)
    other = splits.with_wrong_labels(labels, share, 3, seed=5)
    assert np.any(other != got)
    # Sums of labels do not overflow a narrow type.
    many = np.arange(4000, dtype=np.uint8) % 200
    got = splits.with_wrong_labels(many, share, 200, seed=4)
    moved = (got.astype(int) - many)[got != many] % 200
    assert got.dtype == np.uint8 and len(moved) == 1200
    assert got.max() < 200 and np.bincount(moved).max() < 20


@pytest.mark.parametrize('share', [1.0, -0.1, float('nan')])
def test_impossible_shares_of_wrong_labels_are_refused(share):
  with pytest.raises(ValueError, match='share must be'):
    splits.with_wrong_labels(np.zeros(5, int), share, 2, seed=0)
