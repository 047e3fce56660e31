"""The examples of the user pages run unchanged."""

import dataclasses
from fractions import Fraction
import os
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import fedjax_het as fh
from fedjax_het import experiment
from fedjax_het.aggregation.slicing import make_level
from fedjax_het.engine.clock import Device
from tests.experiment.tiny_runs import tiny_config
from tests.test_docs import ROOT, examples, execute

DATA = examples(ROOT / 'docs' / 'your_data.md')
PAGES = (
    'your_data', 'reading_a_run', 'callbacks', 'optimizers', 'howto/partition',
    'adding_a_model',
)  # fmt: skip
# Examples of code that becomes a part of the library.
OF_THE_LIBRARY = {'model', 'models', 'heads'}


@pytest.mark.parametrize('page', PAGES)
def test_examples_are_short(page):
  for name, code in examples(ROOT / 'docs' / f'{page}.md').items():
    if page != 'adding_a_model' or name not in OF_THE_LIBRARY:
      lines = [line for line in code.splitlines() if line.strip()]
      assert len(lines) <= 12, name


def test_arrays_train():
  names = execute(DATA['arrays'])
  data, model = names['data'], names['model']
  assert data.images.dtype == 'float32' and data.images.shape == (569, 30)
  federation = fh.Federation(
      (fh.Group('all', model, np.arange(6)),),
      fh.LocalTraining(optax.adam, lambda round_num: 1e-3, 2, 16),
  )
  algorithm = fh.ALGORITHMS['fedavg'](federation)
  state = fh.init_state(algorithm, federation, jax.random.key(0))
  run_round = fh.make_round(algorithm, federation, cohort_size=6)
  for _ in range(3):
    state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
  evaluate = fh.make_evaluate(
      algorithm, federation, names['x'], names['y'], data.preprocess
  )
  assert evaluate(state)['all'].accuracy[0] > 0.85


def test_the_table_of_refusals():
  page = (ROOT / 'docs' / 'your_data.md').read_text()
  zeros, labels = np.zeros((10, 8, 8)), np.zeros(10, int)
  nan = zeros.copy()
  nan[3] = np.nan
  model = fh.create('mini_resnet6', (8, 8, 1), 10)
  federation = fh.Federation(
      (fh.Group('a', model, np.arange(1)),),
      fh.LocalTraining(optax.sgd, lambda round_num: 1e-3, 1, 5),
  )
  algorithm = fh.ALGORITHMS['fedavg'](federation)

  def wrong_rank():
    fh.make_evaluate(algorithm, federation, zeros, labels, lambda x, key=0: x)

  def train(data):
    state = fh.init_state(algorithm, federation, jax.random.key(0))
    run_round = fh.make_round(algorithm, federation, cohort_size=1)
    run_round(state, data, jax.random.key(1), jax.random.key(2))

  for call in (
      lambda: fh.federate(zeros, np.zeros(1442, int), [[0]]),
      lambda: fh.federate(zeros, labels + 12, [[0]], num_classes=10),
      lambda: fh.federate(nan, labels, [[0]]),
      wrong_rank,
      lambda: train(fh.federate(zeros, labels, [np.arange(10)])),
      lambda: train(fh.federate(zeros, labels + 12, [np.arange(10)])),
  ):
    with pytest.raises(ValueError) as error:
      call()
    assert f'`{error.value}`' in page


def test_the_npz_file_and_its_command(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  execute(DATA['npz'])
  config = tiny_config('fedavg', dataset='npz', data_file='cancer.npz')
  built = experiment.build(config)
  assert built.dataset.train_images.shape == (469, 30)
  assert built.dataset.num_classes == 2
  (tmp_path / 'cancer.csv').write_text('a,b,label\n1.5,2,0\n3,4,1\n')
  found = execute(DATA['csv'], np=np)
  np.testing.assert_array_equal(found['x'], [[1.5, 2], [3, 4]])
  np.testing.assert_array_equal(found['y'], [0, 1])
  assert found['y'].dtype == int


def test_a_module_is_a_model(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code = examples(ROOT / 'docs' / 'adding_a_model.md')
  model = execute(code['module'])['model']
  variables = model.init(jax.random.key(0))
  x = np.zeros((2, 8, 8, 1), np.float32)
  assert model.apply(variables, x)[0].shape == (2, 10)
  (tmp_path / 'my_file.py').write_text(code['module'] + code['function'])
  config = execute(code['groups'], config=fh.default_config())['config']
  experiment.check(config)
  made = fh.create('my_file:net', (8, 8, 1), 10, features=4)
  assert made.outputs['my_file_net_features4_trunk'] == (4,)


def test_a_module_is_narrowed():
  code = examples(ROOT / 'docs' / 'adding_a_model.md')
  level = make_level(execute(code['widths'])['model'], Fraction(1, 2))
  params = level.model.abstract_variables.params
  inner = params['net8_trunk']['module']
  assert inner['Conv_1']['kernel'].shape == (3, 3, 4, 4)
  assert params['net8_head']['kernel'].shape == (8 * 8 * 4, 10)


def test_widths_of_a_module_in_a_config(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code = examples(ROOT / 'docs' / 'adding_a_model.md')
  net = code['widths'].partition('\n\nmodel = ')[0] + '\n\n'
  (tmp_path / 'my_file.py').write_text(net + code['function'])
  config = execute(code['rates'], fh=fh)['config']
  experiment.check(config)
  config.groups.half.features = 16
  with pytest.raises(ValueError, match=r'differ in features \(16 and 8\); '):
    experiment.check(config)


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  execute(DATA['npz'])
  execute(DATA['partition'])
  for arguments in (
      ['configs/fedavg.py:quick', 'dataset=npz', 'data_file=cancer.npz'],
      ['configs/fedin.py:file=parts.json', 'personal_test=true',
       'num_rounds=1', 'local.epochs=1'],
  ):  # fmt: skip
    config, *entries = arguments
    done = subprocess.run(
        [sys.executable, '-m', 'launch.train', f'--config={config}',
         *(f'--config.{entry}' for entry in entries)],
        capture_output=True, text=True,
        env={
            **os.environ, 'PYTHONPATH': str(ROOT),
            'JAX_COMPILATION_CACHE_DIR': jax.config.jax_compilation_cache_dir,
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'Report: ' in done.stdout


def test_the_partition_is_that_of_the_file(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = execute(DATA['partition'])
  from configs import fedin

  config = fedin.get_config('file=parts.json')
  config.personal_test = True
  built = experiment.build(config)
  assert [part.tolist() for part in built.parts] == names['train']
  assert [part.tolist() for part in built.own_tests] == names['test']
  with pytest.raises(ValueError, match='exclude each other'):
    fedin.get_config('iid,file=parts.json')


def test_the_table_and_the_fleet_of_the_page():
  code = examples(ROOT / 'docs' / 'command_line.md')
  table = execute(code['table'])['get_table']()
  assert [*table.rows] == ['FedAvg', 'FedIN'] and table.seeds == (0, 1, 2)
  config = execute(code['fleet'])['get_config']()
  built = experiment.build(config)
  phones = [device.pause == 30 for device in built.devices]
  assert len(phones) == 10 and sum(phones) == 6
  # The page names all values of a device, with their defaults.
  text = (ROOT / 'docs' / 'command_line.md').read_text()
  text = text.partition('## A fleet of your own')[2]
  text = text.partition('example: fleet')[0]
  for field in dataclasses.fields(Device):
    number = 'none'
    if field.default is not None:
      number = f'{field.default:g}'.replace('e+0', 'e')
    found = re.search(rf'`{field.name}`.*?(?=`|$)', text, re.DOTALL)
    if field.name != 'up':  # Its number is behind that of `down`.
      assert re.search(rf'(?<![\d.]){re.escape(number)}\)', found[0])
  assert '(1.25e6, 5e6)' in text and Device.up == 1.25e6


def test_personal_evaluation_and_reading_back(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  config = tiny_config('private', num_rounds=1)
  monkeypatch.setattr(fh, 'default_config', lambda name: config)
  names = execute(DATA['personal'])
  table, number, later = capsys.readouterr().out.rsplit('\n', 3)[:3]
  assert 'own test examples, last round: mean' in table
  assert 0 < float(number) < 1 and later == number
  (tmp_path / 'runs' / 'personal').rename(tmp_path / 'runs' / 'quick')
  code = examples(ROOT / 'docs' / 'reading_a_run.md')['load']
  read = execute(code)
  logits = np.asarray(read['logits'])
  hits = logits.argmax(axis=1) == read['digits'].test_labels
  (group,) = (g for g, ids in read['run'].groups.items() if ids[0] == 0)
  first = names['result'].summary.last[f'accuracy/{group}/models'][0]
  assert np.mean(hits) == pytest.approx(first)
  assert (tmp_path / 'client0.msgpack').stat().st_size > 1000


def test_the_callbacks_of_the_page_follow_a_run(tmp_path, monkeypatch):
  code = examples(ROOT / 'docs' / 'callbacks.md')
  monkeypatch.chdir(tmp_path)
  config = tiny_config(num_rounds=1)
  config.groups = {'mini_resnet8': dict(model='mlp', clients=5)}
  config.cohort_size = None
  monkeypatch.setattr(fh, 'default_config', lambda name: config)
  watch = execute(code['own'])['Watch']()
  custom = execute(code['metric'])['custom']
  run = fh.run
  monkeypatch.setattr(
      fh, 'run',
      lambda config, workdir, callbacks: run(
          config, workdir, callbacks=[*callbacks, custom, watch]
      ),
  )  # fmt: skip
  result = execute(code['callbacks'])['result']
  assert watch.lines == len(result.rows) == 3
  assert result.rows[-1]['norm'] > 0
  assert watch.on_row(dict(split='test', accuracy=1)) == 'accurate enough'


def test_the_optimisers_of_the_page_are_right(tmp_path, monkeypatch):
  code = examples(ROOT / 'docs' / 'optimizers.md')
  config = execute(code['optimizer'])['config']
  experiment.check(config)
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').write_text(code['mine'])
  config.local.optimizer = 'mine.py:clipped'
  config.local.optimizer_args = dict(by=0.5)
  experiment.check(config)
