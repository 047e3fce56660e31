"""Methods on tables and on texts, by name and from a file."""

import jax
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.data import sources
from fedjax_het.engine.rounds import init_state, make_round
from fedjax_het.models import create
from fedjax_het.reporting.summary import summarise
from tests.experiment.tiny_runs import tiny_config
from tests.test_docs import ROOT, examples, execute

pytestmark = pytest.mark.usefixtures('undrawn')
METHODS = ('fedavg', 'fedin', 'fedhe', 'fedepth')
PAGE = ROOT / 'docs' / 'your_data.md'


@pytest.mark.parametrize(
    ('name', 'test'), [('breast_cancer', 113), ('wine', 34), ('iris', 30)]
)
def test_tables_are_whole_and_divided_by_class(name, test):
  import sklearn.datasets

  whole = getattr(sklearn.datasets, f'load_{name}')()
  data = sources.load(name)
  assert data.train_images.dtype == np.float32 and len(data.test_labels) == test
  rows = np.concatenate([data.train_images, data.test_images])
  want = whole.data.astype(np.float32)
  assert sorted(map(tuple, rows)) == sorted(map(tuple, want))
  of_class = np.bincount(whole.target)
  assert (np.bincount(data.test_labels) == of_class // 5).all()


def texts(dtype=np.int32, first=3):
  """Texts of 6 ids below 50; the class is whether the first ids are high."""
  rng = np.random.default_rng(0)
  y = np.arange(240) % 2
  x = rng.integers(0, 50, (240, 6))
  x[:, :first] = x[:, :first] // 2 + 25 * y[:, None]
  x = x.astype(dtype)
  return dict(x_train=x[:180], y_train=y[:180], x_test=x[180:], y_test=y[180:])


def text_config(method, path, **arrays):
  np.savez(path, **{**texts(), **arrays})
  config = tiny_config(method, dataset='npz', data_file=str(path))
  config.groups = {
      f'text{depth}': dict(model='text', clients=2, depth=depth)
      for depth in (0, 1)
  }
  config.model = dict(vocabulary=50, width=0.25)
  config.cohort_size = None
  config.partition = dict(name='iid', seed=0)
  config.local.learning_rate = 3e-2
  config.local.epochs = 3
  return config


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('kind', ['text', 'table'])
def test_a_round_takes_texts_and_tables(method, kind, tmp_path):
  config = text_config(method, tmp_path / 'text.npz')
  if kind == 'table':
    config = tiny_config(method, dataset='wine')
  built = experiment.build(config)
  state = jax.eval_shape(
      lambda key: init_state(built.algorithm, built.federation, key),
      jax.random.key(0),
  )
  run = make_round(
      built.algorithm, built.federation, cohort_size=4, backend='map'
  )
  keys = 2 * [jax.random.key(0)]
  after, _ = jax.eval_shape(run, state, built.data, *keys)
  assert after == state


@pytest.mark.parametrize(
    'method',
    [
        pytest.param(name, marks=() if name == 'fedavg' else pytest.mark.slow)
        for name in METHODS
    ],
)
def test_methods_learn_texts(method, tmp_path):
  config = text_config(method, tmp_path / 'text.npz')
  config.num_rounds = config.checkpoint_every = config.eval_every = 3
  if method == 'fedin':  # It also trains on pairs, and needs more rounds.
    config.num_rounds = config.checkpoint_every = config.eval_every = 8
  result = experiment.run(config, tmp_path / 'run')
  assert summarise(result.rows).last['accuracy'] > 0.8
  if method == 'fedavg':
    apply, variables = experiment.load_run(tmp_path / 'run').model('text1')
    x = texts()['x_test']
    hits = apply(variables, x).argmax(axis=1) == texts()['y_test']
    assert hits.mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize('method', METHODS)
def test_methods_learn_a_table(method, tmp_path):
  config = tiny_config(method, dataset='breast_cancer')
  config.partition = dict(name='iid', seed=0)
  config.num_rounds = config.checkpoint_every = config.eval_every = 6
  config.model = dict(hidden=8)
  config.local.learning_rate = 1e-2
  result = experiment.run(config, tmp_path / 'run')
  assert summarise(result.rows).last['accuracy'] > 0.8


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(x_test=texts()['x_test'] + 9),
         r'^groups\.text0: its vocabulary=50 holds the token ids 0\.\.49, but '
         r'npz has 58; set vocabulary to at least 59\.$'),
        (dict(x_test=texts()['x_test'] - 9), r'but npz has -9\.$'),
        (texts(np.uint8), 'examples of npz are uint8, which are pixels.$'),
        (texts(np.float32), r'but the examples of npz are float32\.$'),
    ],
)  # fmt: skip
def test_what_is_no_token_id_is_refused(tmp_path, changes, message):
  config = text_config('fedavg', tmp_path / 'text.npz', **changes)
  with pytest.raises(ValueError, match=message):
    experiment.build(config)


def test_augmentation_of_texts_and_tables_is_refused(tmp_path):
  config = text_config('fedavg', tmp_path / 'text.npz')
  for augment in ('crop_flip', 'crop_flip_once'):
    config.local.augment = augment
    with pytest.raises(ValueError, match=r'is for images .* are \(6,\) int32'):
      experiment.build(config)
  config = tiny_config('fedavg', dataset='iris', local__augment='crop_flip')
  with pytest.raises(ValueError, match=r'of iris are \(4,\) float32'):
    experiment.build(config)


def test_the_example_text_and_its_refusals(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  x = execute(examples(PAGE)['text'])['x']
  assert x.shape == (600, 16) and 0 <= x.min() and x.max() < 1000
  from configs import fedavg

  config = fedavg.get_config('text')
  config.dataset, config.data_file = 'npz', 'text.npz'
  config.model.vocabulary = 1000
  models = [group.model for group in experiment.build(config).federation.groups]
  assert [model.outputs['mean'] for model in models] == 3 * [(32,)]
  page = PAGE.read_text()
  with np.load('text.npz') as file:
    arrays = dict(file)
  for entries, changes in (
      ({}, dict(x_test=np.full((120, 16), 1005))),
      ({}, {k: arrays[k].astype(np.uint8) for k in ('x_train', 'x_test')}),
      (dict(dataset='breast_cancer', data_file=None), {}),
  ):
    np.savez('text.npz', **{**arrays, **changes})
    config.update(entries)
    with pytest.raises(ValueError) as error:
      experiment.build(config)
    assert f'`{error.value}`' in page


def test_an_id_out_of_range_is_not_a_number():
  model = create('text', (3,), 2, vocabulary=4, padding=-1)
  variables = model.init(jax.random.key(0))
  for wrong in (-1, 4):
    logits, _ = model.apply(variables, np.array([[0, 1, 2], [0, wrong, 2]]))
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()


@pytest.mark.parametrize('norm', ['none', 'batch', 'group'])
@pytest.mark.parametrize('depth', [0, 2])
def test_a_prediction_does_not_depend_on_the_padding(depth, norm):
  options = dict(vocabulary=9, width=0.25, depth=depth, norm=norm)
  text, mask = np.array([[5, 8, 3, 1], [2, 2, 7, 0]]), np.array([True, True])
  short = create('text', (4,), 3, **options)
  variables = short.init(jax.random.key(0))
  sides = {(0, 3), (3, 0), (2, 1)}
  if depth == 0:  # By hand: the mean of the vectors, and a linear layer.
    vectors = variables.params['embed']['embedding']
    mean = np.stack([vectors[text[0]].mean(0), vectors[text[1, :3]].mean(0)])
    head = variables.params['head']
    want = mean @ head['kernel'] + head['bias'][None]
    np.testing.assert_allclose(short.apply(variables, text)[0], want, 1e-5)
  for train in (False, True):
    want, stats = short.apply(variables, text, train=train, mask=mask)
    assert len(set(np.asarray(want).ravel().tolist())) == want.size
    for side in sides:
      longer = create('text', (7,), 3, **options)
      padded = np.pad(text, ((0, 0), side))
      got = longer.apply(variables, padded, train=train, mask=mask)
      jax.tree.map(
          lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6),
          got, (want, stats),
      )  # fmt: skip
  empty, _ = short.apply(variables, np.zeros((1, 4), np.int32))
  np.testing.assert_array_equal(empty[0], variables.params['head']['bias'])


def test_without_padding_every_id_is_a_token():
  model = create('text', (2,), 2, vocabulary=4, padding=-1)
  variables = model.init(jax.random.key(0))
  one, two = model.apply(variables, np.array([[3, 0], [3, 3]]))[0]
  assert np.abs(one - two).max() > 1e-3
  with pytest.raises(ValueError, match='padding'):
    create('text', (2,), 2, vocabulary=4, padding=4)
