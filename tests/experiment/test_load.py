"""Reading a run back: config, metrics and models are those of the run."""

import json

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import fedjax_het as fh
from fedjax_het import experiment
from fedjax_het.data import sources
from fedjax_het.experiment import trained
from fedjax_het.reporting import shown
from tests.experiment.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures('undrawn')


def tiny(algorithm, **changes):
  config = tiny_config(algorithm, num_rounds=2, **changes)
  config.groups.large.depth = 2  # One shape: less to compile.
  return config


@pytest.fixture(scope='module')
def results(tmp_path_factory):
  """A run with a model per group, and one with a model per client."""
  folder = tmp_path_factory.mktemp('runs')
  return {
      name: experiment.run(tiny(name, seed=3), folder / name)
      for name in ('fedavg', 'private')
  }


def files(folder):
  return {
      path: path.stat().st_mtime_ns for path in sorted(folder.rglob('*'))
  }


def accuracy(model, x, y):
  apply, variables = model
  return np.mean(np.asarray(apply(variables, x)).argmax(axis=1) == y)


@pytest.mark.parametrize('name', ['fedavg', 'private'])
def test_models_give_the_accuracies_of_the_last_line(results, name):
  result = results[name]
  before = files(result.workdir)
  run = fh.load_run(result.workdir)
  digits = sources.load('digits')
  last, models = result.summary.last, run.models()
  assert [*models] == (
      ['large', 'small'] if name == 'fedavg' else [0, 1, 2, 3, 4]
  )
  for group, clients in run.groups.items():
    mine = [group] if name == 'fedavg' else clients
    found = [
        accuracy(models[key], digits.test_images, digits.test_labels)
        for key in mine
    ]
    np.testing.assert_allclose(
        found, last[f'accuracy/{group}/models'], rtol=1e-6
    )
    counts = run.confusion[group]
    assert counts.shape == (len(mine), 10, 10)
    np.testing.assert_allclose(
        np.trace(counts, axis1=1, axis2=2) / counts[0].sum(), found, rtol=1e-6
    )
    assert run.class_accuracy[group].shape == (len(mine), 10)
  assert run.rounds == 2
  assert files(result.workdir) == before  # Nothing is written or touched.


def test_config_and_metrics_are_those_of_the_run(results):
  run = fh.load_run(results['fedavg'].workdir)
  assert run.config.to_dict() == tiny('fedavg', seed=3).to_dict()
  assert run.rows == results['fedavg'].rows
  table = run.metrics()
  assert table['round'] == [0, 1, 2]
  assert table['accuracy/small'] == [
      row['accuracy/small'] for row in run.rows if row['split'] == 'test'
  ]
  assert {len(column) for column in table.values()} == {3}
  assert 'accuracy/small/models' not in table
  assert run.metrics('train')['clients'] == [4, 4]
  with pytest.raises(ValueError, match=r"Unknown split 'tset'.*'test'"):
    run.metrics('tset')


def test_columns_have_a_place_for_every_line():
  rows = [
      dict(round=1, split='train', loss=None, server=dict(loss=2.0)),
      dict(round=2, split='train', loss=1.0, nonfinite=[3]),
      dict(round=2, split='test', accuracy=0.5),
  ]
  assert shown.columns(rows, 'train') == {
      'round': [1, 2], 'loss': [None, 1.0], 'server/loss': [2.0, None],
  }


def test_a_model_is_exported_and_read_by_flax(results, tmp_path):
  model = fh.load_run(results['private'].workdir).model(client=4)
  model.save(tmp_path / 'client.msgpack')
  data = (tmp_path / 'client.msgpack').read_bytes()
  plain = flax.serialization.msgpack_restore(data)
  assert {*plain} == {'params', 'stats'}
  zeros = jax.tree.map(np.zeros_like, model.variables)
  again = flax.serialization.from_bytes(zeros, data)
  for got, want in zip(
      jax.tree.leaves(again), jax.tree.leaves(model.variables), strict=True
  ):
    np.testing.assert_array_equal(got, want)
  x = np.zeros((1, 8, 8, 1), np.uint8)
  np.testing.assert_array_equal(
      model.apply(again, x), model.apply(model.variables, x)
  )
  with pytest.raises(ValueError, match=r'takes inputs of shape \(8, 8, 1\)'):
    model.apply(again, np.zeros((1, 8, 8), np.uint8))


@pytest.mark.parametrize('name', ['fedavg', 'private'])
def test_all_models_are_exported_and_read_back(results, tmp_path, name):
  run = fh.load_run(results[name].workdir)
  models = run.models()
  clients = [f'client{i}' for i in range(5)]
  names = dict(fedavg=['large', 'small'], private=clients)
  files = run.export(tmp_path / 'a')
  assert [path.name for path in files] == [f'{n}.msgpack' for n in names[name]]
  folders = run.export(tmp_path / 'b', format='orbax')
  assert [path.name for path in folders] == names[name]
  for key, file, folder in zip(models, files, folders, strict=True):
    want = models[key].variables
    data = flax.serialization.from_bytes(want, file.read_bytes())
    found = ocp.StandardCheckpointer().restore(folder)
    tree = flax.serialization.from_state_dict(want, found)
    jax.tree.map(np.testing.assert_array_equal, data, want)
    jax.tree.map(np.testing.assert_array_equal, tree, want)
  with pytest.raises(FileExistsError, match='is there already; name another'):
    run.export(tmp_path / 'b', format='orbax')
  with pytest.raises(ValueError, match="'orbx'; did you mean 'orbax'"):
    run.export(tmp_path / 'c', format='orbx')


@pytest.mark.parametrize(
    ('name', 'which'),
    [('fedavg', dict(group='small')), ('private', dict(client=4))],
)
def test_features_end_in_the_outputs_of_the_model(
    results, name, which, monkeypatch
):
  run = fh.load_run(results[name].workdir)
  x = sources.load('digits').test_images[:7]
  features = run.features(x, **which)
  apply, variables = run.model(**which)
  assert [*features][-1] == 'head' and {*features} == {*variables.params}
  assert {len(values) for values in features.values()} == {7}
  outputs = [*features.values()][-1]
  np.testing.assert_allclose(outputs, apply(variables, x), rtol=1e-5)
  with pytest.raises(ValueError, match=r'takes inputs of shape \(8, 8, 1\)'):
    run.features(x[:, :4], **which)
  several = trained.Model(None, ({}, {}))
  monkeypatch.setattr(trained.Trained, 'model', lambda *_, **__: several)
  with pytest.raises(ValueError, match=f'{name} are not one network each'):
    run.features(x, **which)


def test_wrong_questions_are_refused(results, tmp_path):
  shared = fh.load_run(results['fedavg'].workdir)
  personal = fh.load_run(results['private'].workdir)
  for call, message in (
      (lambda: shared.model(), 'either a group or a client'),
      (lambda: shared.model('small', client=0), 'either a group or a client'),
      (lambda: shared.model('smal'), "Unknown group 'smal'; did you mean"),
      (lambda: shared.model(client=5), '^client must be at least 0 and at mos'),
      (lambda: shared.model(client=-1), '^client must be at least 0 and at mo'),
      (lambda: personal.model('small'), r'name one of the clients \[2, 3, 4\]'),
  ):
    with pytest.raises(ValueError, match=message):
      call()
  with pytest.raises(FileNotFoundError, match='is not a workdir'):
    fh.load_run(tmp_path)


@pytest.mark.parametrize(
    'damage',
    [
        dict(algorithm='x'),
        # As versions wrote it that kept this entry in another section.
        dict(algorithm=dict(name='fedmd', keep_optimizer=True), local=[1]),
    ],
)
def test_a_damaged_config_is_refused_in_one_line(results, tmp_path, damage):
  for path in results['fedavg'].workdir.iterdir():
    if path.is_file():
      (tmp_path / path.name).write_bytes(path.read_bytes())
  file = tmp_path / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | damage))
  with pytest.raises(ValueError, match=r'^The files of .* do not fit') as e:
    fh.load_run(tmp_path)
  assert '\n' not in str(e.value)


def test_a_damaged_checkpoint_is_passed_over_and_stays(tmp_path):
  config = tiny('private', checkpoint_every=1)
  result = experiment.run(config, tmp_path)
  newest = tmp_path / 'checkpoints' / '2'
  for path in newest.rglob('*'):
    if path.is_file():
      path.write_bytes(b'')
  before = files(tmp_path)
  run = fh.load_run(tmp_path)
  assert run.rounds == 1 and files(tmp_path) == before
  digits = sources.load('digits')
  found = accuracy(
      run.model(client=2), digits.test_images, digits.test_labels
  )
  rows = [row for row in result.rows if row['split'] == 'test']
  assert found == pytest.approx(rows[1]['accuracy/small/models'][0])


def test_a_partition_file_may_have_moved(tmp_path):
  labels = sources.load('digits').train_labels
  parts = [[*map(int, part)] for part in np.array_split(range(len(labels)), 5)]
  file = tmp_path / 'parts.json'
  file.write_text(json.dumps(parts))
  config = tiny('private')
  config.partition = dict(name='file', seed=0, file=str(file))
  experiment.run(config, tmp_path / 'run')
  moved = file.rename(tmp_path / 'moved.json')
  with pytest.raises(FileNotFoundError, match='no such partition file'):
    fh.load_run(tmp_path / 'run').models()
  run = fh.load_run(tmp_path / 'run', partition_file=str(moved))
  assert run.rounds == 2 and run.config.partition.file == str(file)


@pytest.mark.parametrize('read_back', [False, True])
def test_a_run_is_shown_as_a_short_table(results, read_back):
  shown_run = results['private']
  if read_back:
    shown_run = fh.load_run(shown_run.workdir)
  text = repr(shown_run)
  assert len(text) < 1000 and len(text.splitlines()) < 15
  assert str(results['private'].workdir) in text
  percent = f'{100 * results["private"].summary.last["accuracy/small"]:.2f} %'
  assert percent in text
  html = shown_run._repr_html_()
  assert html.count('<tr>') == 5 and percent in html


def test_names_are_escaped_in_html(results):
  result = results['private']._replace(workdir='<b>&')
  assert '&lt;b&gt;&amp;' in result._repr_html_()
