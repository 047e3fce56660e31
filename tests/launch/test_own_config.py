"""Config files that register what is the user's own, as the pages say."""

import sys

import pytest

from launch import python_files
from tests.fuzz import forks
from tests.test_docs import ROOT, examples

DOCS = ROOT / 'docs'
# All four, and a linen module of the config file itself.
GET_CONFIG = """
fedjax_het.MODELS['own'] = net


def get_config(arg='quick'):
  config = common.get_config('fedmedian', arg)
  config.dataset = 'pixels'
  config.partition = dict(name='by_class', seed=0, first=2)
  config.groups = dict(net=3, own=3)
  config.model = {}
  config.num_rounds = 1
  return config
"""


DRY_RUN = ['--dry_run', '--config.backend=vmap']


@pytest.mark.parametrize(
    ('first_line', 'arguments', 'says'),
    [
        ('', DRY_RUN, 'Nothing was trained.'),
        ('from __future__ import annotations\n', DRY_RUN,
         'Nothing was trained.'),
        pytest.param('', [], 'Report: ', marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_config_file_registers_four_kinds(
    first_line, arguments, says, tmp_path
):
  model = examples(DOCS / 'adding_a_model.md')
  net = model['module'] + model['function']
  algorithm = examples(DOCS / 'first_algorithm.md')
  (tmp_path / 'fedmedian.py').write_text(algorithm['algorithm'])
  (tmp_path / 'my_file.py').write_text(first_line + net)
  (tmp_path / 'my_config.py').write_text(
      first_line
      + examples(DOCS / 'your_data.md')['source']
      + examples(DOCS / 'howto' / 'partition.md')['function']
      + algorithm['config']
      + model['named']
      + net
      + GET_CONFIG
  )
  arguments = [
      f'--config={tmp_path / "my_config.py"}',
      f'--workdir={tmp_path / "run"}',
      *arguments,
  ]
  done = forks.run('train', arguments, ROOT)
  assert done.code == 0, done.err
  assert says in done.out


def test_a_config_imports_files_beside_it(tmp_path, monkeypatch):
  """As Python itself does where the command is `python my_config.py`."""
  monkeypatch.setattr(sys, 'path', [*sys.path])
  (tmp_path / 'lies_beside.py').write_text('NUMBER = 7\n')
  path = tmp_path / 'my_config.py'
  path.write_text('from lies_beside import NUMBER\ndef get_config(): pass\n')
  assert python_files.load(path, 'get_config').NUMBER == 7
