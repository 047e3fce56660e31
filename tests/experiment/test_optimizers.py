"""Optimisers and schedules of optax by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het import experiment
from fedjax_het.engine.types import LocalTraining
from fedjax_het.experiment import optimizers
from fedjax_het.experiment.local import local_training
from launch import config_flag

WEIGHTS = dict(w=np.arange(6.0).reshape(2, 3), b=np.ones(3))
WEIGHTS = jax.tree.map(np.float32, WEIGHTS)


def config(**changes):
  made = experiment.default_config()
  made.local.update(changes)
  return made


def two_steps(tx):
  state, grads = tx.init(WEIGHTS), WEIGHTS
  for _ in range(2):
    grads, state = tx.update(grads, state, WEIGHTS)
  return grads


def assert_same(tx, want):
  for a, b in zip(
      jax.tree.leaves(two_steps(tx)), jax.tree.leaves(two_steps(want)),
      strict=True,
  ):  # fmt: skip
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('changes, want', [
    ({}, optax.adam(0.1)),
    (dict(optimizer='adamw', weight_decay=0.01),
     optax.adamw(0.1, weight_decay=0.01)),
    (dict(optimizer='sgd', momentum=0.9, nesterov=True, weight_decay=0.01),
     optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, 0.9, True))),
    (dict(optimizer='sgd', clip_norm=0.5),
     optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))),
    (dict(optimizer='adam', optimizer_args=dict(b1=0.5, eps=1e-3)),
     optax.adam(0.1, b1=0.5, eps=1e-3)),
    (dict(optimizer='lion', optimizer_args=dict(b1=0.5)),
     optax.lion(0.1, b1=0.5, weight_decay=0.0)),
    (dict(optimizer='rmsprop', optimizer_args=dict(momentum=0.9, decay=0.8)),
     optax.rmsprop(0.1, momentum=0.9, decay=0.8)),
])  # fmt: skip
def test_an_optimizer_is_that_of_optax(changes, want):
  made = config(**changes)
  experiment.check(made)
  local = local_training(made)
  assert_same(local.optimizer(0.1), want)
  simple = changes.keys() <= {'optimizer', 'momentum', 'clip_norm'}
  assert local.drop_unused_weights == simple


def test_every_optimizer_of_optax_can_be_named():
  for name in optimizers.OPTIMIZERS:
    experiment.check(config(optimizer=name))
  # Its line search needs the loss, which local steps do not pass to it.
  assert 'lbfgs' not in optimizers.OPTIMIZERS
  with pytest.raises(ValueError, match=r'needs.*value.*a local step'):
    experiment.check(config(optimizer='optax:lbfgs'))
  assert {'lion', 'lamb', 'adafactor', 'yogi'} <= {*optimizers.OPTIMIZERS}
  assert 'noisy_sgd' not in optimizers.OPTIMIZERS


def test_a_function_of_the_user_makes_any_transformation(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
      'import optax\n'
      'def clipped(rate, *, by=1.0):\n'
      '  return optax.chain(optax.clip(by), optax.sgd(rate))\n'
  )
  made = config(optimizer=f'{path}:clipped', optimizer_args=dict(by=0.5))
  experiment.check(made)
  want = optax.chain(optax.clip(0.5), optax.sgd(0.1))
  assert_same(local_training(made).optimizer(0.1), want)
  made.local.optimizer = f'{path}:other'
  with pytest.raises(ValueError, match='has no function other'):
    experiment.check(made)


def test_a_transformation_without_its_learning_rate_is_refused():
  with pytest.raises(ValueError, match='must be a function of the learning ra'):
    LocalTraining(optax.adam(0.1), lambda round_num: 0.1, 1, 8)


@pytest.mark.parametrize('name, args, want', [
    ('exponential_decay', dict(transition_steps=2, decay_rate=0.5),
     optax.exponential_decay(0.1, 2, 0.5)),
    ('warmup_cosine_decay_schedule',
     dict(init_value=0.0, warmup_steps=3, decay_steps=8),
     optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 8)),
    ('piecewise_constant_schedule', dict(boundaries_and_scales={'2': 0.5}),
     optax.piecewise_constant_schedule(0.1, {2: 0.5})),
])  # fmt: skip
def test_a_schedule_counts_rounds(name, args, want):
  made = config(learning_rate=0.1, schedule=name, schedule_args=args)
  experiment.check(made)
  rate = local_training(made).learning_rate
  for i in (0, 1, 2, 5):
    np.testing.assert_allclose(rate(jnp.int32(i)), want(i), rtol=1e-6)


@pytest.mark.parametrize('changes, message', [
    (dict(optimizer='lion', optimizer_args=dict(b9=1.0)),
     "local.optimizer_args.b9: optimizer 'lion' has no option 'b9'"),
    (dict(optimizer='yogi', optimizer_args=dict(ep=1.0)),
     "has no option 'ep'; did you mean 'eps'"),
    (dict(optimizer='lion', optimizer_args=dict(weight_decay=1.0)),
     "has no option 'weight_decay'"),
    (dict(optimizer_args=dict(b1=float('nan'))), 'b1 must be a finite number'),
    (dict(optimizer_args=dict(b1=1j)), r'or None, got 1j\.'),
    (dict(optimizer_args=dict(b1='a')), "optimizer='adam' cannot be used with"),
    (dict(schedule='exponential'), "did you mean 'exponential_decay'"),
    (dict(schedule='linear_schedule', schedule_args=dict(end_value=0.0)),
     'local.schedule_args.transition_steps is missing'),
    (dict(schedule_args=dict(alpha=0.1)),
     "schedule 'constant' has no option 'alpha'; there are none"),
])  # fmt: skip
def test_wrong_names_and_arguments_are_refused(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    experiment.check(config(**changes))
  assert '\n' not in str(error.value)


def test_arguments_are_given_on_the_command_line():
  argv = config_flag.with_config([
      'train', '--config.local.optimizer=lion',
      '--config.local.optimizer_args.b1=0.8',
      '--config.local.schedule=exponential_decay',
      '--config.local.schedule_args.transition_steps=3',
      '--config.local.schedule_args.staircase=true',
  ])  # fmt: skip
  config_flag.check(argv)
  overrides = config_flag._overrides(argv)
  made, _ = config_flag._load(argv[1].split('=', 1)[1], overrides)
  assert made.local.optimizer_args.to_dict() == {'b1': 0.8}
  assert made.local.schedule_args.to_dict() == dict(
      transition_steps=3, staircase=True
  )
  wrong = [*argv, '--config.local.optimizer_args.b12=1']
  with pytest.raises(ValueError, match="optimizer_args 'b12'; did you mean 'b"):
    config_flag.check(wrong)
