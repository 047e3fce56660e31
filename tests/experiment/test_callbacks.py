"""Callbacks: what they are called with, and what they write."""

import csv
import importlib.machinery
import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest

import fedjax_het as fh
from fedjax_het import experiment
from fedjax_het.data import sources
from fedjax_het.experiment import progress, runner
from fedjax_het.experiment.callbacks import (
  Callbacks,
  Start,
  extras,
  from_config,
)
from tests.experiment.tiny_runs import (
  compiled_once,
  tiny_config,
  without_seconds,
)

pytestmark = pytest.mark.usefixtures('undrawn')


def row(round_num, split='test', **numbers):
  return dict(round=round_num, split=split, seconds=1.0, **numbers)


def start(folder=pathlib.Path(), rows=(), rounds=0, config=None):
  config = experiment.default_config() if config is None else config
  return Start(config, folder, rows, rounds, {}, None, {})


def evaluations(values):
  return [row(i, accuracy=value) for i, value in enumerate(values)]


# -- early stopping ------------------------------------------------------------


@pytest.mark.parametrize('values, patience, options, stops', [
    ([.1, .2, .3, .25, .3], 2, {}, 4),  # An equal value is no improvement.
    ([.1, .2, .3, .25, .31, .3], 2, {}, None),
    ([.1, None, .05], 2, {}, 2),  # Not finite: no improvement.
    ([.3, .2, .1, .2], 1, dict(mode='min'), 3),
    ([.10, .11, .12], 2, dict(min_delta=0.05), 2),
])
def test_early_stopping_counts_evaluations(values, patience, options, stops):
  callback = fh.EarlyStopping(patience, **options)
  callback.on_start(start())
  found = [bool(callback.on_row(line)) for line in evaluations(values)]
  assert found.index(True) == stops if stops else not any(found)
  # A restart after any line gives the same decisions.
  for i in range(len(values) + 1):
    again = fh.EarlyStopping(patience, **options)
    reason = again.on_start(start(rows=evaluations(values)[:i]))
    assert bool(reason) == (i > 0 and found[i - 1])
    rest = [bool(again.on_row(line)) for line in evaluations(values)[i:]]
    assert rest == found[i:]


def test_a_run_that_was_stopped_stops_again_whatever_came_after():
  rows = [row(i, 'train', loss=x) for i, x in enumerate((1.0, 2.0, 0.5))]
  callback = fh.EarlyStopping(1, 'train/loss', 'min')
  assert 'up to round 1' in callback.on_start(start(rows=rows))


def test_the_metric_is_of_held_out_examples_if_there_are_some():
  config = experiment.default_config()
  config.validation = 0.2
  callback = fh.EarlyStopping(1)
  callback.on_start(start(config=config))
  assert not callback.on_row(row(0, 'validation', accuracy=0.5))
  assert not callback.on_row(row(0, 'test', accuracy=0.1))
  assert not callback.on_row(row(1, 'train', accuracy=0.1))
  reason = callback.on_row(row(1, 'validation', accuracy=0.4))
  assert reason == (
      'accuracy has not improved in the last line (validation), up to '
      'round 1'
  )


@pytest.mark.parametrize(
    ('returned', 'message'),
    [
        (3, r'it must return \{name: number\} or None, got 3\.'),
        ({'a': [1, 2]}, r"the metric 'a' must be a number, got \[1, 2\]\."),
        ({'loss': 1}, "the line has an entry 'loss' already"),
    ],
)
def test_what_custom_metrics_may_return(returned, message):
  callbacks = Callbacks([fh.CustomMetrics(lambda models: returned)])
  message = f'CustomMetrics failed in on_evaluation: {message}'
  with pytest.raises(fh.CallbackError, match=message):
    callbacks.evaluation({'test': row(0, loss=1.0)}, None)
  rows = {'test': row(0, loss=1.0)}
  Callbacks([fh.CustomMetrics(lambda models: None)]).evaluation(rows, None)
  assert rows == {'test': row(0, loss=1.0)}


def test_callbacks_are_a_list(tmp_path):
  with pytest.raises(ValueError, match='callbacks must be a list of callbacks'):
    experiment.run(tiny_config(), tmp_path, callbacks=fh.CSV())


def test_wrong_callbacks_are_refused():
  callback = fh.EarlyStopping(1, 'acuracy')
  callback.on_start(start())
  with pytest.raises(ValueError, match="no metric 'acuracy'; did you mean"):
    callback.on_row(row(0, accuracy=0.5))
  callback = fh.EarlyStopping(1, 'train/los')
  # A run that had other callbacks until now.
  assert callback.on_start(start(rows=[row(0, accuracy=0.5)])) is None
  # Nothing arrived in round 1, and nothing of the group b in round 2.
  assert callback.on_row(row(1, 'train', loss=None))
  group = fh.EarlyStopping(2, 'train/loss/b', 'min')
  group.on_start(start())
  assert not group.on_row(row(2, 'train', **{'loss': 1.0, 'loss/a': 1.0}))
  with pytest.raises(ValueError, match="train lines have no metric 'los'; did"):
    callback.on_row(row(3, 'train', loss=1.0))
  held_out = 'validation/accuracy is a metric of held-out examples, and there a'
  for make in (fh.BestCheckpoint, lambda name: fh.EarlyStopping(1, name)):
    with pytest.raises(ValueError, match=held_out):
      make('validation/accuracy').on_start(start())
  for call, message in (
      (lambda: fh.EarlyStopping(0), 'patience must be at least 1, got 0'),
      (lambda: fh.EarlyStopping(1, mode='mx'), "Unknown mode 'mx'; did you"),
      (
          lambda: fh.BestCheckpoint('train/loss', 'min'),
          'choose a metric of test or',
      ),
      (lambda: fh.BestCheckpoint('loss'), "'loss' is a loss, but mode='max'"),
      (lambda: fh.EarlyStopping(1, 'train/loss/b'), "set mode='min'"),
      (lambda: fh.Profile(3, 2), 'last must be at least 3, got 2'),
      (lambda: Callbacks([fh.CSV]), r'callbacks\[0\] must be a Callback'),
  ):
    with pytest.raises(ValueError, match=message):
      call()


# -- files ---------------------------------------------------------------------


def read(path):
  with open(path, encoding='utf-8') as file:
    return [*csv.DictReader(file)]


def test_csv_has_a_line_for_each_row_and_new_columns(tmp_path):
  (tmp_path / 'train.csv').write_text('of an interrupted run')
  logger = fh.CSV()
  logger.on_start(start(tmp_path, (row(0, accuracy=0.5),)))
  assert not (tmp_path / 'train.csv').exists()
  logger.on_row(row(1, 'train', loss=1.5, nonfinite=[1]))
  logger.on_row(row(2, 'train', loss=None, server=dict(loss=2.0)))
  logger.on_row(row(2, accuracy=0.75))
  assert read(tmp_path / 'train.csv') == [
      {'round': '1', 'seconds': '1.0', 'loss': '1.5', 'server/loss': ''},
      {'round': '2', 'seconds': '1.0', 'loss': '', 'server/loss': '2.0'},
  ]
  assert [line['accuracy'] for line in read(tmp_path / 'test.csv')] == [
      '0.5', '0.75',
  ]


def test_a_profile_is_taken_of_its_rounds(tmp_path, monkeypatch):
  calls = []
  monkeypatch.setattr(jax.profiler, 'start_trace', calls.append)
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('end'))
  profile = fh.Profile(3, 4)
  profile.on_start(start(tmp_path))
  profile.on_dispatch(1, 2)
  assert not calls
  profile.on_dispatch(3, 3)
  assert calls == [str(tmp_path / 'profile')]
  profile.on_row(row(3, 'train'))
  profile.on_dispatch(4, 4)
  profile.on_row(row(3, 'test'))
  assert len(calls) == 1
  profile.on_row(row(4, 'train'))
  profile.on_dispatch(5, 5)
  profile.close()
  assert calls[1:] == ['end']


def test_the_loggers_of_extras_make_these_calls(tmp_path, monkeypatch):
  """Uses fakes of the packages, which need not be installed."""
  calls = []

  class Fake(types.ModuleType):
    """Records calls, which return the fake; no experiment is found."""

    def __getattr__(self, name):
      if name.startswith('__'):
        raise AttributeError(name)

      def call(*args, **options):
        calls.append((name, args, options))
        return None if name == 'get_experiment_by_name' else self

      return call

  fake = Fake('fake')
  fake.info = types.SimpleNamespace(run_id='id')
  for name in ('wandb', 'mlflow', 'mlflow.tracking'):
    monkeypatch.setitem(sys.modules, name, fake)
  fake.__spec__ = importlib.machinery.ModuleSpec('fake', None)
  rows = (row(1, 'train', **{'loss': 1.5, 'loss/a': 2.0}),)
  for logger in (fh.WandB(), fh.MLflow()):
    logger.on_start(start(tmp_path, rows))
    logger.on_row(row(1, accuracy=None))
    logger.on_end(None)
    logger.close()
  names = [name for name, _, _ in calls]
  assert names == [
      'Settings', 'init', 'log', 'log', 'finish',
      'MlflowClient', 'get_experiment_by_name', 'create_experiment',
      'create_run', 'log_dict', *['log_metric'] * 4, 'set_terminated',
  ]  # fmt: skip
  assert calls[1][2]['mode'] == 'offline'
  assert calls[2][1:] == (
      ({'train/seconds': 1.0, 'train/loss': 1.5, 'train/loss/a': 2.0},),
      dict(step=1),
  )
  assert calls[5][1] == ((tmp_path / 'mlflow').as_uri(),)
  assert [args[1:] for name, args, _ in calls if name == 'log_metric'] == [
      ('train.seconds', 1.0), ('train.loss', 1.5), ('train.loss.a', 2.0),
      ('test.seconds', 1.0),
  ]  # fmt: skip
  assert calls[-1][1] == ('id', 'FINISHED')


@pytest.mark.parametrize('name', ['tensorboard', 'wandb', 'mlflow'])
def test_a_missing_extra_is_refused_in_one_line(monkeypatch, name):
  monkeypatch.setattr(extras.importlib.util, 'find_spec', lambda name: None)
  config = experiment.default_config()
  (config if name == 'tensorboard' else config.callbacks)[name] = True
  with pytest.raises(ValueError) as error:
    from_config(config)
  assert str(error.value) == (
      f'The logger {name} needs the extra {name}: pip install '
      f"'fedjax_het[{name}]'."
  )


# -- the config ----------------------------------------------------------------


def test_the_config_names_the_callbacks():
  config = experiment.default_config()
  assert from_config(config) == []
  config.callbacks.update(
      dict(csv=True, patience=3, best_checkpoint=True, profile=(2, 4))
  )
  experiment.check(config)
  kinds = [type(callback) for callback in from_config(config)]
  assert kinds == [fh.CSV, fh.Profile, fh.BestCheckpoint, fh.EarlyStopping]


@pytest.mark.parametrize('changes, message', [
    (dict(patience=0), 'callbacks.patience must be at least 1, got 0'),
    (dict(mode='up'), "Unknown callbacks.mode 'up'"),
    (dict(profile=(4, 2)), r'callbacks.profile must be a first and a last'),
    (dict(profile=(4,)), r'callbacks.profile must be a first and a last'),
])
def test_a_wrong_entry_is_refused(changes, message):
  config = experiment.default_config()
  config.callbacks.update(changes)
  with pytest.raises(ValueError, match=message):
    experiment.check(config)


# -- whole runs ----------------------------------------------------------------


class Recorder(fh.Callback):
  """Records its calls."""

  def __init__(self):
    self.calls = []

  def on_start(self, run):
    self.calls.append(('start', run.rounds, len(run.rows)))

  def on_dispatch(self, first, last):
    self.calls.append(('dispatch', first, last))

  def on_evaluation(self, rows, models):
    self.calls.append(('evaluation', models.rounds, [*rows]))
    return {'norm': norm(models.model('small'))}

  def on_row(self, row):
    self.calls.append((row['split'], row['round']))

  def on_end(self, result):
    self.calls.append(('end', result.finished))

  def close(self):
    self.calls.append(('close',))


def norm(model):
  return np.sum(np.square(jax.tree.leaves(model.variables.params)[0]))


@pytest.fixture(scope='module', autouse=True)
def _programs():
  with compiled_once():
    yield


@pytest.fixture(scope='module')
def followed(tmp_path_factory):
  """A run with callbacks, its result and the recorder."""
  recorder = Recorder()
  folder = tmp_path_factory.mktemp('runs') / 'followed'
  return experiment.run(
      tiny_config(eval_every=2), folder,
      callbacks=[fh.CSV(), recorder, fh.BestCheckpoint('norm', 'min')],
  ), recorder  # fmt: skip


def test_callbacks_are_called_in_order(followed):
  result, recorder = followed
  assert recorder.calls == [
      ('start', 0, 0),
      ('evaluation', 0, ['test']), ('test', 0),
      ('dispatch', 1, 1), ('dispatch', 2, 2), ('train', 1), ('train', 2),
      ('evaluation', 2, ['test']), ('test', 2),
      ('dispatch', 3, 3), ('dispatch', 4, 4), ('train', 3), ('train', 4),
      ('evaluation', 4, ['test']), ('test', 4),
      ('end', True), ('close',),
  ]  # fmt: skip
  assert len(read(result.workdir / 'train.csv')) == 4


def test_custom_metrics_and_the_best_models_are_stored(followed):
  result, _ = followed
  tests = [line for line in result.rows if line['split'] == 'test']
  best = min(tests, key=lambda line: line['norm'])
  run = fh.load_run(result.workdir, best=True)
  assert run.rounds == best['round']
  assert float(norm(run.model('small'))) == pytest.approx(best['norm'])
  digits = sources.load('digits')
  apply, variables = run.model('small')
  found = np.asarray(apply(variables, digits.test_images)).argmax(axis=1)
  assert np.mean(found == digits.test_labels) == pytest.approx(
      best['accuracy/small']
  )
  last = fh.load_run(result.workdir)
  assert last.rounds == 4
  assert float(norm(last.model('small'))) == pytest.approx(tests[-1]['norm'])


def test_an_error_keeps_the_checkpoint_and_the_run_goes_on(followed, tmp_path):
  class Broken(Recorder):
    def on_row(self, row):
      if row['round'] == 3:
        raise KeyError('mine')

  callbacks = [fh.CSV(), Broken(), fh.BestCheckpoint('norm', 'min')]
  with pytest.raises(
      fh.CallbackError, match="The callback Broken failed in on_row: 'mine'"
  ):
    experiment.run(tiny_config(eval_every=2), tmp_path, callbacks=callbacks)
  assert callbacks[1].calls[-1] == ('close',)
  recorder = Recorder()
  experiment.run(
      tiny_config(eval_every=2), tmp_path,
      callbacks=[fh.CSV(), recorder, fh.BestCheckpoint('norm', 'min')],
  )  # fmt: skip
  assert recorder.calls[0] == ('start', 2, 4)
  whole, _ = followed
  path = tmp_path / 'metrics.jsonl'
  assert without_seconds(path) == without_seconds(
      whole.workdir / 'metrics.jsonl'
  )
  assert [line['round'] for line in read(tmp_path / 'train.csv')] == [*'1234']
  best = [fh.load_run(w, best=True).rounds for w in (whole.workdir, tmp_path)]
  assert best[0] == best[1]


def test_the_best_models_outlive_better_ones_that_are_lost(tmp_path):
  """Improvements in rounds 1, 3 and 5; killed in 6, with a checkpoint of 4."""
  values = {1: 3.0, 3: 5.0, 5: 9.0}

  class Killed(Recorder):
    def on_row(self, row):
      if (row['round'], row['split']) == (6, 'train'):
        raise KeyboardInterrupt

  counted = fh.CustomMetrics(lambda models: {'v': values.get(models.rounds, 0)})
  config = tiny_config(num_rounds=8, eval_every=1, checkpoint_every=4)
  best = fh.BestCheckpoint('v')
  with pytest.raises(KeyboardInterrupt):
    experiment.run(config, tmp_path, callbacks=[counted, best, Killed()])
  assert {'3', '5'} <= {path.name for path in (tmp_path / 'best').iterdir()}
  config.eval_every = 8  # Round 5 is not evaluated again.
  assert experiment.run(config, tmp_path, callbacks=[counted, best]).finished
  assert fh.load_run(tmp_path, best=True).rounds == 3


@pytest.mark.parametrize('last', [1, 3])
def test_best_models_are_kept_again_after_a_run_that_was_killed(
    followed, tmp_path, last
):
  """Before the first checkpoint after round 0, and after it."""

  class Killed(Recorder):
    def on_row(self, row):
      if (row['round'], row['split']) == (last, 'train'):
        raise KeyboardInterrupt

  config = tiny_config(eval_every=2)
  best = fh.BestCheckpoint('norm', 'max')
  with pytest.raises(KeyboardInterrupt):
    experiment.run(config, tmp_path, callbacks=[Killed(), best])
  again = experiment.run(config, tmp_path, callbacks=[Recorder(), best])
  assert again.finished
  tests = [line for line in again.rows if line['split'] == 'test']
  largest = max(tests, key=lambda line: line['norm'])
  assert fh.load_run(tmp_path, best=True).rounds == largest['round']
  whole, _ = followed
  assert without_seconds(tmp_path / 'metrics.jsonl') == without_seconds(
      whole.workdir / 'metrics.jsonl'
  )


def test_a_run_stops_early_and_stops_again(tmp_path):
  def run(patience):
    counted = fh.CustomMetrics(lambda models: {'round0': -models.rounds})
    stopping = fh.EarlyStopping(patience, 'test/round0')
    return experiment.run(
        tiny_config(eval_every=2), tmp_path, callbacks=[counted, stopping]
    )

  result = run(1)  # Never better than before the first round.
  assert not result.finished and result.summary.rounds == 2
  assert 'test/round0 has not improved in the last line' in result.stopped
  assert 'stopped before its last (test/round0' in repr(result)
  before = (tmp_path / 'metrics.jsonl').read_bytes()
  again = run(1)
  assert again.stopped == result.stopped and again.facts == result.facts
  assert (tmp_path / 'metrics.jsonl').read_bytes() == before
  longer = run(5)
  assert longer.finished and not longer.stopped


def test_a_metric_may_be_newer_than_the_run(tmp_path):
  config = tiny_config(eval_every=1, num_rounds=1)
  experiment.run(config, tmp_path)
  config.num_rounds = 2
  counted = fh.CustomMetrics(lambda models: {'mine': models.rounds})
  result = experiment.run(
      config, tmp_path, callbacks=[counted, fh.EarlyStopping(3, 'mine')]
  )
  assert result.finished


def test_a_run_may_be_stopped_before_it_begins(tmp_path):
  class Never(fh.Callback):
    def on_start(self, run):
      return 'not today'

  result = experiment.run(tiny_config(), tmp_path / 'a', callbacks=[Never()])
  assert result.stopped == 'not today' and not result.finished
  assert not (tmp_path / 'a' / 'report.md').exists()
  assert experiment.run(tiny_config(num_rounds=1), tmp_path / 'b').finished


def test_old_workdirs_without_callbacks_are_resumed_and_read(tmp_path):
  config = tiny_config(eval_every=2)
  result = experiment.run(config, tmp_path, stop=lambda: True)
  path = tmp_path / 'config.json'
  stored = json.loads(path.read_text())
  del stored['callbacks']
  path.write_text(json.dumps(stored))
  assert not result.finished
  assert fh.load_run(tmp_path).config.callbacks.patience is None
  with pytest.raises(FileNotFoundError, match='has no best checkpoint'):
    fh.load_run(tmp_path, best=True).models()
  assert experiment.run(config, tmp_path).finished


def test_a_run_needs_no_workdir_and_shows_its_progress(tmp_path, monkeypatch):
  from IPython import display

  shown = []

  class Handle:
    def update(self, content):
      shown.append(content.data)

  def show(content, display_id):
    assert display_id
    shown.append(content.data)
    return Handle()

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(runner, 'in_notebook', lambda: True)
  monkeypatch.setattr(progress, 'in_notebook', lambda: True)
  monkeypatch.setattr(progress, '_INTERVAL', 0.0)
  monkeypatch.setattr(display, 'display', show)
  result = fh.run(tiny_config(eval_every=2))
  assert result.workdir.parent.name == 'runs' and result.finished
  assert result.workdir.resolve().parent == tmp_path / 'runs'
  assert 'Round 0/4' in shown[0]
  last = f'accuracy {result.summary.last["accuracy"]:.3f}'
  assert 'value="4"' in shown[-1] and last in shown[-1]
  bar = progress._NotebookBar(4, 0)  # As in a stopped run.
  bar.update(1)
  assert 's left' in shown[-1]
  bar.close()
  assert 'value="1"' in shown[-1] and 's left' not in shown[-1]
