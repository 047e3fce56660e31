"""Tasks other than classification need no change of algorithms."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.federated import federate
from fedjax_het.engine import rounds
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.task import CLASSIFICATION, Task
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import Block, BlockModel
from tests.tiny import SHAPE, Dense, preprocess, tiny_local

LENGTH, WORDS = 4, 5


class Reshape(nn.Module):
  """A dense layer whose outputs are reshaped."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dense(int(np.prod(self.shape)))(x).reshape(-1, *self.shape)


def squared_error(outputs, labels):
  return jnp.square(outputs[:, 0] - labels)


REGRESSION = Task(
    'regression',
    squared_error,
    {'mse': squared_error, 'mae': lambda z, y: jnp.abs(z[:, 0] - y)},
    larger_is_better=False,
)


def mean_over_words(of_word):
  return lambda logits, words: jnp.mean(
      jax.vmap(of_word, 1, 1)(logits, words), axis=1
  )


SEQUENCE = Task(
    'sequence',
    mean_over_words(CLASSIFICATION.losses),
    {'accuracy': mean_over_words(CLASSIFICATION.metrics['accuracy'])},
)


def examples(task, num=24):
  """Images of constant brightness, which determines the labels."""
  level = np.linspace(0, 255, num).astype(np.uint8)
  images = np.broadcast_to(level[:, None, None, None], (num, *SHAPE))
  if task is REGRESSION:
    return images, 2 * level / 255 - 1
  word = (level // 52)[:, None]
  return images, np.broadcast_to(np.minimum(word, WORDS - 1), (num, LENGTH))


def federation_of(task):
  shape = (1,) if task is REGRESSION else (LENGTH, WORDS)
  groups = tuple(
      Group(
          f'depth{depth}',
          BlockModel(
              f'depth{depth}',
              (
                  Block('stem', Dense(8)),
                  *(Block(f'mid{i}', Dense(8)) for i in range(depth)),
                  Block('head', Reshape(shape)),
              ),
              SHAPE,
              shape[-1],
              (1, 1 + depth),
          ),
          np.array([depth - 1, depth + 1]),
      )
      for depth in (1, 2)
  )
  return Federation(groups, tiny_local(optax.adam, 1e-2, task=task, epochs=8))


@pytest.mark.parametrize(
    ('name', 'task'),
    [
        ('fedavg', REGRESSION),
        ('fedin', SEQUENCE),
        ('fedepth', SEQUENCE),
        pytest.param('fedavg', SEQUENCE, marks=pytest.mark.slow),
        pytest.param('fedin', REGRESSION, marks=pytest.mark.slow),
    ],
)
def test_methods_learn_another_task(name, task):
  images, labels = examples(task)
  federation = dataclasses.replace(
      federation_of(task),
      label=jax.ShapeDtypeStruct(labels.shape[1:], labels.dtype),
  )
  data = federate(
      images, labels, [np.arange(k, 24, 4) for k in range(4)], preprocess
  )
  options = dict(num_pairs=4) if name == 'fedin' else {}
  algorithm = ALGORITHMS[name](federation, **options)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  evaluate = make_evaluate(
      algorithm, federation, images, labels, preprocess, batch_size=10
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = evaluate(state)
  for _ in range(8):
    state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
  after = evaluate(state)
  for group in federation.groups:
    scores = after[group.name]
    assert set(scores.metrics) == set(task.metrics)
    assert np.all(scores.loss < 0.6 * before[group.name].loss)
  # FeDepth's compile a step.
  assert algorithm.facts is None or algorithm.facts()


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        *(
            (name, {})
            for name, constructor in ALGORITHMS.items()
            if needs_of(constructor).task == 'classification'
        ),
        # It uses a KL divergence of class probabilities.
        ('fedepth', dict(mkd_models=2)),
    ],
)
def test_methods_for_classification_refuse_another_task(name, options):
  with pytest.raises(ValueError) as error:
    ALGORITHMS[name](federation_of(REGRESSION), **options)
  what = ' with '.join((name, *options))
  assert str(error.value) == (
      f"{what} is made for the task 'classification', not for 'regression'."
  )


def test_scores_are_means_of_the_tasks_functions():
  """The means are over all examples, whatever the batch size."""
  federation = federation_of(REGRESSION)
  images, labels = examples(REGRESSION)
  algorithm = ALGORITHMS['fedavg'](federation)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  scores = make_evaluate(
      algorithm, federation, images, labels, preprocess, batch_size=7
  )(state)
  for group in federation.groups:
    variables = algorithm.client_model(state.server, (), group)
    variables = jax.tree.map(jnp.asarray, variables)
    outputs = group.model.apply(variables, preprocess(images))[0]
    error = np.asarray(outputs)[:, 0] - labels
    got = scores[group.name]
    np.testing.assert_allclose(got.loss[0], np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(
        got.metrics['mae'][0], np.mean(np.abs(error)), rtol=1e-5
    )


def test_a_masked_batch_counts_its_real_examples_alone():
  outputs, labels = jnp.array([[1.0], [3.0], [9.0]]), jnp.array([0.0, 1, 0])
  mask = jnp.array([True, True, False])
  assert float(REGRESSION.loss(outputs, labels, mask)) == 2.5
  assert float(REGRESSION.loss(outputs, labels, mask & False)) == 0.0
