"""Confusion matrices: their file, the table and the pictures by class."""

import numpy as np
import pytest

from fedjax_het.analysis import pictures
from fedjax_het.engine.confusion import class_accuracy
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.reporting import class_report
from fedjax_het.reporting.confusion_file import read_confusion, write_confusion

COUNTS = {
    'b10': np.array([[[3, 1, 0], [0, 4, 0], [0, 0, 0]]]),
    'b2': np.array([
        [[4, 0, 0], [2, 2, 0], [0, 0, 0]],
        [[0, 4, 0], [0, 4, 0], [0, 0, 0]],
    ]),
}
IDS = {'b10': np.array([0]), 'b2': np.array([1, 2])}
FACTS = dict(groups=dict(b10={}, b2={}), partition=[[1, 3, 0]] * 3)
LAST = {'accuracy/b10/models': [0.9], 'accuracy/b2/models': [0.7, None]}


@pytest.fixture
def confusion(tmp_path):
  write_confusion(tmp_path, 7, IDS, COUNTS)
  return read_confusion(tmp_path)


def test_the_file_holds_what_was_written(confusion):
  assert confusion.round_num == 7
  for group, counts in COUNTS.items():
    np.testing.assert_array_equal(confusion.counts[group], counts)
    np.testing.assert_array_equal(confusion.client_id[group], IDS[group])


def test_a_missing_file_is_none_and_a_damaged_one_is_refused(tmp_path):
  assert read_confusion(tmp_path) is None
  path = tmp_path / 'confusion.npz'
  path.write_bytes(b'PK half an archive')
  with pytest.raises(ValueError, match=r'confusion\.npz is damaged'):
    read_confusion(tmp_path)
  write_confusion(tmp_path, 7, IDS, {'b10': np.zeros((1, 2, 3))})
  with pytest.raises(ValueError, match=r'is damaged \(counts of shape'):
    read_confusion(tmp_path)


def test_class_accuracy_is_the_share_of_the_diagonal():
  found = class_accuracy(COUNTS['b2'])
  np.testing.assert_array_equal(found, [[1, 0.5, np.nan], [0, 1, np.nan]])


def test_the_table_is_by_class_with_groups_in_natural_order(confusion):
  assert class_report.table(confusion) == [
      ['class', 'test examples', 'b2', 'b10', 'mean over groups'],
      ['0', '4', '50.00 %', '75.00 %', '62.50 %'],
      ['1', '4', '75.00 %', '100.00 %', '87.50 %'],
      ['2', '0', '-', '-', '-'],
  ]


def test_pictures_show_shares_maps_and_clients(
    confusion, tmp_path, monkeypatch
):
  drawn = {}
  for name in ('draw_heat_maps', 'draw_strips', 'draw_matrices'):
    monkeypatch.setattr(
        pictures, name,
        lambda values, *args, name=name, **kw: drawn.update({name: values}),
    )  # fmt: skip
  found = class_report.content(confusion, LAST, FACTS)
  files = class_report.draw(tmp_path, found, CLASSIFICATION.main)
  assert [*files] == ['classes', 'clients', 'confusion']
  (strip,) = drawn['draw_strips'].values()
  np.testing.assert_array_equal(strip['b2'], [0.7, np.nan])
  held, known = drawn['draw_heat_maps'].values()
  np.testing.assert_array_equal(held, [[0.25, 0.75, 0]] * 3)
  np.testing.assert_array_equal(known[:, 1], [1, 0.5, 1])
  matrices = drawn['draw_matrices']
  assert [*matrices] == ['b2', 'b10']
  np.testing.assert_array_equal(matrices['b2'][0], [0.5, 0.5, 0])
  assert np.isnan(matrices['b2'][2]).all()


def test_one_model_for_all_groups_is_one_matrix(confusion):
  same = dict.fromkeys(confusion.counts, COUNTS['b10'])
  assert [*class_report._shares(confusion._replace(counts=same))] == [
      'All groups'
  ]


def test_without_matrices_the_report_has_no_such_section():
  assert class_report.sections(None, {}) == []


def test_groups_of_one_client_have_models_of_their_own_if_the_run_says_so():
  last = {'accuracy/b10/models': [0.9], 'accuracy/b2/models': [0.7]}
  own = {'personal/clients/b10': [0.8], 'personal/clients/b2': [0.6]}
  for personal in (True, False):
    facts = dict(FACTS, personal=personal)
    found = class_report.content(None, {**last, **own}, facts)['clients']
    assert found.pop('On own test examples') == dict(b10=[0.8], b2=[0.6])
    assert [*found] == ['On the whole test set'] * personal
  # Facts of older runs do not say it.
  assert 'clients' not in class_report.content(None, last, FACTS)
