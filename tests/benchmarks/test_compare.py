"""The command that compares two versions of the library."""

import json
import sys

import numpy as np
import pytest

from benchmarks import compare


class Recorded:
  """A version whose rounds take given seconds; records the order of calls."""

  def __init__(self, name, seconds, calls):
    self.name, self.seconds, self.calls = name, seconds, calls

  def round(self):
    self.calls.append(self.name)
    return dict(wall=self.seconds, cpu=2 * self.seconds)


def test_versions_take_turns_and_are_not_mixed_up():
  calls = []
  before, after = Recorded('a', 2.0, calls), Recorded('b', 3.0, calls)
  rounds = compare.take_turns(before, after, 3, pause=0)
  assert ''.join(calls) == 'abbaab'
  assert rounds.shape == (2, 3, 2)
  assert rounds[1].tolist() == [[4.0, 6.0]] * 3


def test_common_load_does_not_change_the_quotient():
  rng = np.random.default_rng(0)
  load = rng.uniform(1, 2, (3, 30, 1))  # Shared by a pair of rounds.
  noise = rng.uniform(0.99, 1.01, (3, 30, 2))
  found = compare.quotients(load * noise * np.array([1.0, 1.04]))
  low, high = found['interval']
  assert 1.03 < low <= found['pairs'] <= high < 1.05
  assert len(found['pairs_by_process']) == 3
  assert found['minima'] == pytest.approx(1.04, abs=0.05)


def test_one_round_is_its_own_interval():
  found = compare.quotients(np.array([[[2.0, 3.0]]]))
  assert found['interval'] == [1.5, 1.5] and found['pairs'] == 1.5


@pytest.mark.parametrize('before', [[], ['--before=nowhere']])
def test_another_folder_is_refused(before, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['compare', *before])
  with pytest.raises(SystemExit):
    compare.main()
  assert 'must be a checkout of the library' in capsys.readouterr().err


@pytest.mark.slow
def test_a_version_beside_itself(tmp_path, monkeypatch):
  path = tmp_path / 'found.json'
  monkeypatch.setattr(sys, 'argv', [
      'compare', f'--before={compare.TREE}', '--workloads=many', '--quick',
      '--scale=tiny', '--references=none', '--repetitions=2', '--processes=1',
      f'--output={path}',
  ])  # fmt: skip
  compare.main()
  ((name, forms),) = json.loads(path.read_text())['cases'].items()
  assert name == 'many/cohort' and 'map' in forms
  for result in forms.values():
    assert result['megabytes'][0] == result['megabytes'][1] > 0
    assert min(result['compile']) > 0
    for clock in ('wall', 'cpu'):
      assert min(result[clock]['median_seconds']) > 0
