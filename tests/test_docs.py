"""README and docs: their examples run, and what they list exists."""

from fractions import Fraction
import functools
import gzip
import pathlib
import re
import struct
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common, fedin
from fedjax_het import experiment
from fedjax_het.aggregation.exchange import SHARINGS
from fedjax_het.aggregation.slicing import make_level
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data import catalog, raw_formats, sources
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.engine import rounds
from fedjax_het.engine.mapping import BACKENDS
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import Received
from fedjax_het.models import MODELS, Variables
from tests.tiny import (
  one_model_federation,
  server_step,
  tiny_data,
  tiny_federation,
  with_group_options,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / 'README.md'
DOCS = sorted((ROOT / 'docs').rglob('*.md'))
FROM_PYTHON = ROOT / 'docs' / 'from_python.md'
FEDMEDIAN = ROOT / 'docs' / 'first_algorithm.md'


def examples(path, kind='example'):
  """{name: code} of the Python blocks marked `<!-- kind: name -->`."""
  blocks = re.findall(
      rf'<!-- {kind}: (\w+) -->\n```python\n(.*?)```', path.read_text(), re.S
  )
  assert blocks and len(dict(blocks)) == len(blocks)
  return dict(blocks)


def execute(code, **names):
  exec(compile(code, '<docs>', 'exec', dont_inherit=True), names)
  return names


def shell_lines(path):
  for block in re.findall(r'```sh\n(.*?)```', path.read_text(), re.S):
    yield from re.sub(r'\\\n *', '', block).splitlines()


@pytest.fixture
def fedmedian(monkeypatch):
  """The page's algorithm, registered as the page's config does."""
  constructor = execute(examples(FEDMEDIAN)['algorithm'])['fedmedian']
  monkeypatch.setitem(ALGORITHMS, 'fedmedian', constructor)
  file = types.SimpleNamespace(fedmedian=constructor)
  monkeypatch.setitem(sys.modules, 'fedmedian', file)
  return constructor


def test_the_readme_marks_two_commands_for_ci():
  blocks = re.findall(
      r'<!-- ci: (\w+) -->\n```sh\n(.*?)```', README.read_text(), re.S
  )
  assert blocks == [
      ('run', 'pip install -e .\npython -m launch.train\n'),
      ('test', "pip install -e '.[test]'\npython -m pytest\n"),
  ]


@pytest.mark.slow
def test_running_an_experiment_by_import(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  names = execute(examples(FROM_PYTHON)['run'])
  assert names['result'].finished
  accuracy, num_bytes = capsys.readouterr().out.split()
  assert 0 < float(accuracy) < 1 and int(num_bytes) > 0
  assert (tmp_path / 'runs' / 'import' / 'report.md').exists()


def test_the_pieces_learn_digits():
  names = execute(examples(FROM_PYTHON)['pieces'])
  for scores in names['scores'].values():
    assert scores.accuracy[0] > 0.4  # Ten classes; about 0.65 in five rounds.


@pytest.mark.slow
def test_fedmedian_learns_digits(fedmedian, tmp_path):
  config = execute(examples(FEDMEDIAN)['config'])['get_config']('quick')
  config.num_rounds = 5
  config.local.epochs = 2
  config.compilation_cache = False  # The tests have their own.
  result = experiment.run(config, tmp_path)
  before, *_, after = [r for r in result.rows if r['split'] == 'test']
  assert after['accuracy'] > before['accuracy'] + 0.15
  assert after['loss'] < before['loss']


def test_fedmedian_takes_medians_over_owners_and_ignores_padding(fedmedian):
  federation = tiny_federation((1, 2), norm=False)
  algorithm = fedmedian(federation)
  server = algorithm.init(jax.random.key(0))

  def received(group, values, client_id):
    params = group.model.abstract_variables.params
    change = jax.tree.map(
        lambda leaf: jnp.stack([jnp.full(leaf.shape, v) for v in values]),
        params,
    )
    return Received((), Variables(change, {}), jnp.array(client_id))

  shallow, deep = federation.groups
  padding = federation.num_clients
  after = server_step(
      algorithm,
      server,
      {
          shallow.name: received(shallow, (1.0, 100.0), (0, 2)),
          deep.name: received(deep, (2.0, 50.0), (1, padding)),
      },
      jax.random.key(1),
  )
  # Only the deep group has 'mid1'.
  for name, moved in dict(stem=2.0, mid0=2.0, mid1=2.0, head=2.0).items():
    change = jax.tree.map(
        jnp.subtract, after.params[name], server.params[name]
    )
    for leaf in jax.tree.leaves(change):
      np.testing.assert_allclose(leaf, moved, rtol=1e-5)


def test_the_short_algorithm_takes_steps_of_unit_gradient():
  federation = tiny_federation((1, 2), norm=False)
  algorithm = execute(
      examples(ROOT / 'docs' / 'adding_an_algorithm.md')['train']
  )['unit_gradient'](federation)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state.server)
  state, _ = run_round(
      state, tiny_data((5, 8, 3, 7)), jax.random.key(1), jax.random.key(2)
  )
  moved = jax.tree.map(jnp.subtract, state.server, before)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(moved))


def test_the_example_model_satisfies_the_contract():
  code = examples(ROOT / 'docs' / 'adding_a_model.md')
  names = execute(code['model'])
  table = eval(
      '{' + code['models'] + '}',
      {'plain_cnn': names['plain_cnn'], '_with': functools.partial},
  )
  small, _, large = (
      build((8, 8, 1), 10, width=0.25) for build in table.values()
  )
  assert small.extractor == ('conv0',) and small.classifier == ('head',)
  assert set(small.block_names) < set(large.block_names)
  assert large.shapes[large.cut[1] - 1] == (8,)
  variables = large.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
  whole, _ = large.apply(variables, x)
  for cut in range(1, len(large.blocks)):
    part, _ = large.apply(variables, x, stop=cut)
    part, _ = large.apply(variables, part, start=cut)
    np.testing.assert_array_equal(part, whole)
  with pytest.raises(ValueError, match='depth of at least 2, got 1'):
    names['plain_cnn']((8, 8, 1), 10, depth=1)


def test_the_example_model_is_narrowed_as_it_declares():
  code = examples(ROOT / 'docs' / 'adding_a_model.md')
  model = execute(code['model'])['plain_cnn']((8, 8, 1), 10, depth=3, width=0.3)
  level = make_level(model, Fraction(1, 2))
  params = level.model.abstract_variables.params
  assert params['conv1']['conv']['kernel'].shape == (3, 3, 5, 5)  # Half of 9.
  assert level.index['conv1']['norm']['scale'][0].tolist() == [0, 1, 2, 3, 4]
  assert params['head']['kernel'].shape == (5, 10)


def test_the_example_head_is_an_exit():
  code = examples(ROOT / 'docs' / 'adding_a_model.md')
  model = execute(code['model'])['plain_cnn']((8, 8, 1), 10, depth=3, width=0.2)
  model = execute(code['heads'])['with_exit'](model, 'conv0', 'exit1')
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
  outputs, _ = model.apply_heads(variables, x)
  assert {name: y.shape for name, y in outputs.items()} == {
      'exit1': (4, 10), 'head': (4, 10),
  }
  alone, _ = model.apply(variables, x, head='exit1')
  np.testing.assert_array_equal(outputs['exit1'], alone)
  assert model.chain('exit1').block_names == ('conv0', 'exit1/pool', 'exit1')


def test_the_example_over_widths_moves_windows():
  """Only parameters in the window change, and the window's begin varies."""
  federation = with_group_options(
      one_model_federation(norm=False), rate=('1/2', '1/4', '1/2')
  )
  code = examples(ROOT / 'docs' / 'adding_an_algorithm.md')['widths']
  algorithm = execute(code)['random_windows'](federation)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=6, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  begins = set()
  for _ in range(3):
    before = jax.device_get(state.server)
    begins.add(int(before.begin) % 8)
    state, _ = run_round(
        state, tiny_data(), jax.random.key(1), jax.random.key(2)
    )
    bias = np.asarray(state.server.params['layer1']['linear']['bias'])
    moved = bias != before.params['layer1']['linear']['bias']
    held = (np.arange(4) + before.begin) % 8
    assert set(np.flatnonzero(moved)) <= set(held) and np.any(moved)
  assert len(begins) > 1
  _, sent = algorithm.downlink(state.server, federation.groups[1], None)
  assert sent['layer1']['linear']['kernel'].shape == (2, 2)


def test_the_example_of_calibration_is_called_as_it_is_defined():
  code = examples(ROOT / 'docs' / 'adding_an_algorithm.md')['calibrate']
  federation = tiny_federation((1,))
  full = federation.groups[0].model
  statistics = mock.create_autospec(static_statistics)
  calibrate = execute(
      code, full=full, local=federation.local, static_statistics=statistics
  )['calibrate']
  server = full.init(jax.random.key(0))
  assert calibrate(server, tiny_data()).stats is statistics.return_value
  assert statistics.call_args.args[0] is full


def test_the_example_groups_have_widths():
  code = examples(ROOT / 'docs' / 'adding_an_algorithm.md')['groups']
  config = experiment.default_config('fedrolex')
  execute(code, config=config)
  experiment.check(config)
  assert config.groups.narrow.rate == '1/4'


def _write_idx(path, array):
  header = struct.pack('>HBB', 0, 8, array.ndim)
  header += struct.pack(f'>{array.ndim}I', *array.shape)
  path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_the_example_data_set_is_read(tmp_path, monkeypatch):
  code = examples(ROOT / 'docs' / 'adding_a_dataset.md')['entry']
  entry = eval(f'dict({code})', dict(vars(catalog)))
  for name, source in entry.items():
    monkeypatch.setitem(catalog.DATASETS, name, source)
  folder = tmp_path / 'kmnist'
  folder.mkdir()
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (7, 28, 28))
  labels = np.arange(7)
  for file, array in zip(
      entry['kmnist'].files, (images, labels, images[:3], labels[:3])
  ):
    _write_idx(folder / file, array)
  data = sources.load('kmnist', tmp_path, verify=False)
  np.testing.assert_array_equal(data.train_images[..., 0], images)
  np.testing.assert_array_equal(data.test_labels, labels[:3])
  with pytest.raises(ValueError, match='60,000 train examples, got 7'):
    sources.load('kmnist', tmp_path)


def test_the_example_reader_reads_and_refuses(tmp_path):
  code = examples(ROOT / 'docs' / 'adding_a_dataset.md')['reader']
  names = execute(
      code, pathlib=pathlib, np=np, Splits=catalog.Splits,
      raw_formats=raw_formats,
  )  # fmt: skip
  read = names['_read_npz']
  images = np.arange(2 * 16, dtype=np.uint8).reshape(2, 4, 4)
  arrays = dict(x_train=images, y_train=[3, 4], x_test=images, y_test=[1, 2])
  np.savez(tmp_path / 'images.npz', **arrays)
  splits = read(tmp_path)
  assert splits.train_images.shape == (2, 4, 4, 1)
  assert splits.test_labels.dtype == np.int32
  np.savez(tmp_path / 'images.npz', x_train=images)
  with pytest.raises(ValueError, match=r'images\.npz lacks y_train, x_test, y'):
    read(tmp_path)
  (tmp_path / 'images.npz').write_bytes(b'')
  with pytest.raises(ValueError, match=r'images\.npz is no \.npz file of num'):
    read(tmp_path)


@pytest.mark.parametrize('path', (README, *DOCS), ids=lambda path: path.name)
def test_every_block_of_python_is_run_or_says_why_not(path):
  for above in re.findall(r'^(.*)\n```python\n', path.read_text(), re.M):
    if re.fullmatch(r'<!-- not run: \w.{9,} -->', above):
      continue
    marked = re.fullmatch(r'<!-- example: (\w+) -->', above)
    assert marked, f'A block below {above!r} is not marked.'
    assert any(
        f"['{marked[1]}']" in text and path.name in text for text in _tests()
    ), f'No test runs {marked[1]}.'


@functools.cache
def _tests():
  """The files of tests that run examples."""
  texts = (path.read_text() for path in ROOT.glob('tests/**/*.py'))
  return [text for text in texts if 'examples(' in text]


def test_the_pages_list_all_there_is():
  listed = set()
  names = ('supported', 'command_line')
  pages = (README, *(ROOT / 'docs' / f'{name}.md' for name in names))
  words = '\n'.join(path.read_text() for path in pages)
  for text in re.findall(r'`([^`\n]+)`', words):
    stem, brace, rest = text.partition('{')
    choices, _, tail = rest.partition('}')
    listed |= {stem + c + tail for c in choices.split(',')} if brace else {text}
  known = (ALGORITHMS, MODELS, sources.DATASETS, PARTITIONS, BACKENDS, SHARINGS)
  variants = (
      common.DATA,
      common.SETTINGS,
      common.SPLITS,
      common.MODELS,
      common.SIZES,
      fedin.VARIANTS,
  )
  assert not {name for table in known + variants for name in table} - listed


@pytest.mark.parametrize('path', (README, *DOCS), ids=lambda path: path.name)
def test_links_and_named_files_exist(path):
  text = re.sub(r'```.*?```', '', path.read_text(), flags=re.S)
  for link in re.findall(r'\]\(([^)#]+)\)', text):
    if not link.startswith('https://'):
      assert (path.parent / link).exists(), link
  for name in re.findall(r'`([\w/]+\.(?:py|jsonl|ipynb))`', text):
    if '/' in name:
      places = (ROOT / name, ROOT / 'fedjax_het' / name)
      assert any(place.exists() for place in places), name


def test_metrics_doc_names_every_key_of_a_run(tmp_path):
  config = experiment.default_config('fedin')
  config.groups = dict(mlp=2)
  config.model = dict(hidden=8, depth=2, norm='none')
  config.num_rounds = 1
  config.compilation_cache = False
  result = experiment.run(config, tmp_path)
  text = (ROOT / 'docs' / 'metrics.md').read_text()
  named = set(re.findall(r'`([^`\n]+)`', text))
  for row in result.rows:
    for key in row:
      assert key.replace('/mlp', '/<group>') in named or (
          key.partition('/')[0] == 'in_loss'
      ), key
  for file in tmp_path.iterdir():
    assert file.name.startswith('.') or file.name in named or (
        file.suffix == '.png'
    ) or f'{file.name}/' in named, file
