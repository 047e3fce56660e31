"""Communication between processes, which does nothing in one process."""

import pathlib

import pytest

from fedjax_het.experiment import processes
from tests.experiment.tiny_runs import tiny_config


def test_one_process_speaks_to_nobody(tmp_path):
  assert not processes.several() and processes.is_first()
  assert processes.gather(dict(a=1)) == [dict(a=1)]
  assert processes.broadcast('x') == 'x'
  assert processes.together(lambda: 3) == 3
  assert processes.on_first(lambda: [1, 2]) == [1, 2]
  processes.check_config(tiny_config())
  processes.check_folder(tmp_path)
  assert not list(tmp_path.iterdir())
  assert processes.Stop(lambda: True)()
  with pytest.raises(KeyError):
    processes.together(dict().popitem)


@pytest.mark.parametrize(
    'error',
    [
        ValueError('wrong'),
        FileNotFoundError('no file'),
        OSError(28, 'No space left on device'),
        KeyError('x'),
    ],
)
def test_an_error_survives_the_way(error):
  again = processes._rebuilt(1, *processes._describe(error))
  assert str(again).endswith(
      f'Process 1: {getattr(error, "strerror", None) or error}'
  )
  if not isinstance(error, KeyError):
    assert type(again) is type(error)
    assert getattr(again, 'errno', None) == getattr(error, 'errno', None)


def test_padded_bytes_come_back():
  for value in (None, 1, 'ä' * 100, [dict(a=0.1)]):
    padded = processes._padded(value)
    assert padded.size & (padded.size - 1) == 0
    assert processes.json.loads(padded.tobytes()) == value


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, 'several', lambda: True)
  monkeypatch.setattr(processes, 'on_first', lambda fn: 'token')
  monkeypatch.setattr(processes, 'together', lambda fn: fn())
  monkeypatch.setattr(processes, '_PATIENCE', 0.2)
  with pytest.raises(ValueError, match='must be on a file system that all'):
    processes.check_folder(pathlib.Path(tmp_path))
