"""Lines of metrics.jsonl: sums and means, torn lines, missing rounds."""

import types
import zlib

import numpy as np
import pytest

from fedjax_het.engine.evaluate import Scores
from fedjax_het.engine.reports import GroupReport, RoundReport
from fedjax_het.engine.task import CLASSIFICATION, Metric
from fedjax_het.engine.traffic import Traffic
from fedjax_het.experiment import metrics, metrics_file
from fedjax_het.reporting.run_files import read_rows
from fedjax_het.reporting.summary import summarise
from tests.tiny import tiny_federation


def report(ids, finite, loss, *, up=100, parts=(), share=()):
  slots = len(ids)

  def traffic(fixed):
    return Traffic(
        np.full(slots, fixed, np.uint32),
        np.tile(np.array(parts, np.uint32), (slots, 1)),
        np.tile(np.array(share, np.float32), (slots, 1)),
    )

  return GroupReport(
      np.array(ids, np.int32),
      np.array(finite),
      dict(train_loss=np.array(loss, np.float32)),
      traffic(10),
      traffic(up),
  )


def test_train_row_counts_real_finite_clients_only():
  federation = tiny_federation(depths=(1, 2), per_group=2)  # Clients 0..3.
  reports = dict(
      # A padding slot (client 4) whose values must not count.
      tiny1=report([0, 4], [True, True], [1.0, 9.0]),
      # Client 3 is dropped, but its bytes have been sent.
      tiny2=report(
          [1, 3], [True, False], [3.0, np.nan], parts=[8, 4], share=[0.5, 1.0]
      ),
  )
  row = metrics.train_row(7, RoundReport(reports), federation, 0.5)
  assert row == {
      'round': 7,
      'split': 'train',
      'seconds': 0.5,
      'loss': 2.0,
      'loss/tiny1': 1.0,
      'loss/tiny2': 3.0,
      'clients': 3,
      'clients/tiny1': 1,
      'clients/tiny2': 2,
      'bytes_up': 100 + 2 * 108,
      'bytes_up/tiny1': 100,
      'bytes_up/tiny2': 216,
      'bytes_down': 10 + 2 * 18,
      'bytes_down/tiny1': 10,
      'bytes_down/tiny2': 36,
      'nonfinite': [3],
  }


def test_train_row_without_any_loss_holds_null():
  federation = tiny_federation(depths=(1,), per_group=2)
  row = metrics.train_row(
      1,
      RoundReport(dict(tiny1=report([0], [False], [np.nan]))),
      federation,
      0.1,
  )
  assert row['loss'] is None and 'loss/tiny1' not in row
  assert row['nonfinite'] == [0]


def test_train_row_holds_what_the_server_measured():
  federation = tiny_federation(depths=(1,), per_group=2)
  groups = dict(tiny1=report([0], [True], [1.0]))
  server = dict(loss=np.float32(0.5), gap=np.float32(np.nan))
  measured = RoundReport(groups, server, np.True_)
  plain = metrics.train_row(1, RoundReport(groups), federation, 0.1)
  row = metrics.train_row(1, measured, federation, 0.1)
  assert row == {**plain, 'server': {'loss': 0.5, 'gap': None}}


def test_test_row_means_over_groups_not_clients():
  scores = dict(
      a=Scores(
          np.array([0, 1, 2]),
          dict(accuracy=np.array([0.2, 0.4, 0.6])),
          np.ones(3),
      ),
      b=Scores(
          np.array([3]), dict(accuracy=np.array([0.8])), np.array([np.inf])
      ),
  )
  federation = types.SimpleNamespace(
      groups=(
          types.SimpleNamespace(name='a', num_clients=3),
          types.SimpleNamespace(name='b', num_clients=1),
      ),
      num_clients=4,
      task=CLASSIFICATION,
  )
  scores['a'] = scores['a']._replace(views=dict(v=np.array([0.1, 0.2, 0.3])))
  scores['b'] = scores['b']._replace(views=dict(v=np.array([0.6])))
  row = metrics.test_row(2, scores, federation, 0.1)
  assert row['accuracy'] == pytest.approx((0.4 + 0.8) / 2)
  assert row['views/v/a'] == pytest.approx(0.2)
  assert row['views/v'] == pytest.approx((3 * 0.2 + 0.6) / 4)
  assert row['accuracy/clients'] == pytest.approx((3 * 0.4 + 0.8) / 4)
  assert row['accuracy/a/models'] == [0.2, 0.4, 0.6]
  assert row['accuracy/a'] == pytest.approx(0.4)
  assert row['accuracy/a/worst'] == 0.2 and row['accuracy/worst'] == 0.2
  assert row['models/a'] == 3 and row['models/b'] == 1
  # Numbers that JSON cannot hold are null, and so are means over them.
  assert row['loss/a'] == 1.0 and row['loss/b'] is None and row['loss'] is None
  # A task's own metric of this name is meant everywhere.
  federation.task = CLASSIFICATION._replace(metrics=dict(loss=None))
  own = {
      name: score._replace(metrics=dict(loss=score.metrics['accuracy']))
      for name, score in scores.items()
  }
  row = metrics.test_row(2, own, federation, 0.1)
  assert row['loss/a'] == pytest.approx(0.4)
  assert row['loss'] == pytest.approx((0.4 + 0.8) / 2)
  assert row['loss/a/models'] == [0.2, 0.4, 0.6]


def write(path, lines):
  path.write_bytes(''.join(lines).encode())
  return path


TEST0 = '{"round": 0, "split": "test", "accuracy": 0.1}\n'
TRAIN1 = '{"round": 1, "split": "train", "loss": 1.10}\n'
TEST1 = '{"round": 1, "split": "test", "accuracy": 0.2}\n'
TRAIN2 = '{"round": 2, "split": "train", "loss": 0.9}\n'


@pytest.mark.parametrize(
    'torn',
    [
        '',
        '{"round": 2',
        '{"round": 2, "x": 1}',
        '\0\0\0\n',
        TRAIN2,
        TRAIN2 + '{"ro',
    ],
)
def test_cut_rows_keeps_whole_lines_byte_for_byte(tmp_path, torn):
  path = write(tmp_path / 'metrics.jsonl', [TEST0, TRAIN1, TEST1, torn])
  rows = metrics_file.cut_rows(path, 1)
  assert [row['round'] for row in rows] == [0, 1, 1]
  assert path.read_text() == TEST0 + TRAIN1 + TEST1


def test_cut_rows_to_nothing(tmp_path):
  assert metrics_file.cut_rows(tmp_path / 'none.jsonl', 0) == []
  path = write(tmp_path / 'metrics.jsonl', [TEST0[:-5]])
  assert metrics_file.cut_rows(path, 0) == []
  assert path.read_text() == ''


@pytest.mark.parametrize(
    ('lines', 'missing'),
    [
        ([TEST0, TRAIN1], 2),
        ([TEST0, TRAIN2], 1),
        ([TEST0, TRAIN1, 'rubbish\n', TRAIN2], 2),
        ([TEST0, TRAIN1, TRAIN1, TRAIN2], 2),
    ],
)
def test_cut_rows_refuses_gaps(tmp_path, lines, missing):
  path = write(tmp_path / 'metrics.jsonl', lines)
  with pytest.raises(ValueError, match=f'lacks or repeats round {missing}, '):
    metrics_file.cut_rows(path, 2)
  assert path.read_text() == ''.join(lines)


def test_read_rows_forgives_a_torn_end_only(tmp_path):
  path = write(tmp_path / 'metrics.jsonl', [TEST0, TRAIN1, '{"rou'])
  assert len(read_rows(path)) == 2
  write(path, [TEST0, '{"rou\n', TRAIN1])
  with pytest.raises(ValueError, match='line 2 is damaged'):
    read_rows(path)


def test_read_rows_names_what_is_out_of_order(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  for lines, number in (
      ([TEST0, TRAIN1, TRAIN1, TEST1], 3),
      ([TEST0, TRAIN2, TRAIN1], 3),
      ([TEST0, TEST1, TRAIN1], 3),
      ([TEST0, '3\n'], 2),
      ([TEST0, '{"round": "1", "split": "train"}\n'], 2),
      ([TEST0, '[' * 9999 + '\n', TRAIN1], 2),
  ):
    write(path, lines)
    with pytest.raises(ValueError, match=f'line {number} is damaged') as error:
      read_rows(path)
    assert '\n' not in str(error.value)


def test_a_checkpoint_marks_lines_and_keeps_a_copy(tmp_path):
  path, copy = tmp_path / 'metrics.jsonl', tmp_path / 'copy.jsonl'
  file = metrics_file.MetricsFile(path, copy)
  file.append({'round': 0, 'split': 'test'})
  mark, keep = file.mark()
  file.append({'round': 1, 'split': 'train'})
  keep()  # As by another thread, while lines are written.
  first = b'{"round": 0, "split": "test"}\n'
  assert copy.read_bytes() == first
  assert mark == dict(bytes=len(first), crc32=zlib.crc32(first))
  file.mark()[1]()
  file.close()
  assert copy.read_bytes() == path.read_bytes()
  rows = metrics_file.restore_rows(path, copy, 0, mark)
  assert rows == [{'round': 0, 'split': 'test'}]
  # Both files are restored; a run continues from there.
  assert copy.read_bytes() == path.read_bytes() == first
  file = metrics_file.MetricsFile(path, copy)
  file.append({'round': 1, 'split': 'train'})
  second, keep = file.mark()
  keep()
  file.close()
  assert second['crc32'] == zlib.crc32(path.read_bytes())
  assert copy.read_bytes() == path.read_bytes()


def test_summary():
  def test(num, accuracy):
    return dict(round=num, split='test', accuracy=accuracy)

  def train(num, seconds, dropped=()):
    return dict(
        round=num,
        split='train',
        seconds=seconds,
        bytes_up=10,
        bytes_down=20,
        nonfinite=list(dropped),
    )

  rows = [
      test(0, 0.1),
      train(1, 9.0),
      test(1, 0.5),
      train(2, 1.0, [4]),
      test(2, 0.7),
      train(3, 2.0),
      test(3, 0.6),
      train(4, 1.5),
      test(4, None),
  ]
  summary = summarise(rows, 0.5)
  assert summary.rounds == 4
  assert summary.last['round'] == 4 and summary.best['round'] == 2
  assert summary.reached == 1
  assert summary.bytes_up == 40 and summary.bytes_down == 80
  assert summary.round_seconds == 1.75
  assert summary.dropped == 1
  assert summarise(rows, 0.9).reached is None
  assert summarise([]).last is None


def test_a_float32_below_the_target_that_it_stands_for_reaches_it():
  rows = [dict(round=5, split='test', accuracy=float(np.float32(0.7)))]
  assert rows[0]['accuracy'] < 0.7
  assert summarise(rows, 0.7).reached == 5
  assert summarise(rows, 0.7001).reached is None


def test_summary_of_a_metric_of_which_less_is_better():
  rows = [
      dict(round=number, split='test', mse=mse)
      for number, mse in enumerate([0.9, 0.5, None, 0.2, 0.3])
  ]
  summary = summarise(rows, 0.5, Metric('mse', larger_is_better=False))
  assert summary.best['mse'] == 0.2 and summary.last['mse'] == 0.3
  assert summary.reached == 1
