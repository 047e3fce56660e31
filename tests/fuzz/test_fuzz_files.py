"""No data file ends in a traceback or hangs; see `files` for the damages."""

import pytest

from tests.fuzz import files, trials

pytest.importorskip('PIL')
pytest.importorskip('array_record')
TRY = 'tests.fuzz.files:try_file'


def read(number, seed):
  return trials.run(files.cases(), number, TRY, seconds=60, first_seed=seed)


def test_whole_files_are_read(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(files.DAMAGES, 'none', lambda path, rng: None)
  files._originals.cache_clear()
  for reader in files.READERS:
    files.try_file(reader, 'none', 0, verify=False)
  files._originals.cache_clear()


def test_some_damaged_files():
  totals, wrong = read(36, seed=1)
  assert not wrong
  assert totals['refused'] > 18


@pytest.mark.slow
def test_many_damaged_files():
  totals, wrong = read(1000, seed=2)
  assert not wrong
  assert sum(totals.values()) >= 600
