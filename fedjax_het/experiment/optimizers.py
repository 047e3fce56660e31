"""Optimisers and learning rate schedules by their names in optax.

An optimiser is a public function of optax whose first argument is
`learning_rate`. A schedule is a function of `optax.schedules` that takes a
learning rate; it counts rounds from 0. The schedules 'constant', 'step' and
'cosine' are defined here and use entries of `local`, as do the weight decay of
all optimisers and the momentum of 'sgd'. An import path, FILE.py:FUNCTION,
names a function from a learning rate to a gradient transformation.
"""

from collections.abc import Callable
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from fedjax_het.models import by_path
from fedjax_het.names import check_name, shown
from fedjax_het.options import check_options

# Arguments that a config cannot hold.
_MASKS = ('mask', 'weight_decay_mask', 'trust_ratio_mask', 'weighting_mask')
# Names of a schedule's learning rate; the first one that it has is used.
_RATES = ('peak_value', 'init_value', 'value')
# Types of arguments; a ConfigDict maps rounds to factors.
_KINDS = dict(
    optimizer_args=float | bool | str | None,
    schedule_args=float | bool | str | None | ml_collections.ConfigDict,
)


def _parameters(fn: Callable) -> dict[str, inspect.Parameter]:
  return dict(inspect.signature(fn).parameters)


def _is_optimizer(name: str, fn: Any) -> bool:
  """Whether it is an optimiser of gradients.

  It has no seed, which all visits would share, and no line search, which calls
  the loss.
  """
  if not inspect.isfunction(fn) or name.startswith(('_', 'scale_')):
    return False
  names = [*_parameters(fn)]
  unfit = {'seed', 'linesearch'} & {*names}
  return names[:1] == ['learning_rate'] and not unfit


OPTIMIZERS = {
    name: fn for name, fn in sorted(vars(optax).items())
    if _is_optimizer(name, fn)
}  # fmt: skip


def _constructor(name: str) -> Callable[..., optax.GradientTransformation]:
  """The function of an optimiser; raises ValueError for an unknown name."""
  if not by_path.is_path(name):
    check_name('local.optimizer', name, OPTIMIZERS)
    return OPTIMIZERS[name]
  try:
    return by_path.imported(name)
  except Exception as e:  # The user's code may raise any type.
    text = ' '.join(str(e).split())
    raise ValueError(
        f'local.optimizer {name!r} cannot be used ({type(e).__name__}: '
        f'{text:.200}).'
    ) from e


def _rate(fn: Callable) -> str | None:
  """The argument of a schedule that is the learning rate."""
  return next((name for name in _RATES if name in _parameters(fn)), None)


_OF_OPTAX = {
    name: fn for name, fn in sorted(vars(optax.schedules).items())
    if inspect.isfunction(fn) and _rate(fn)
}  # fmt: skip


def _constant(local, num_rounds):
  del num_rounds
  return lambda round_num: local.learning_rate


def _step(local, num_rounds):
  del num_rounds
  drops = jnp.asarray(sorted(local.lr_rounds), jnp.int32)
  return lambda round_num: local.learning_rate * local.lr_factor ** jnp.sum(
      round_num + 1 >= drops
  ).astype(jnp.float32)


def _cosine(local, num_rounds):
  return optax.cosine_decay_schedule(local.learning_rate, num_rounds)


_OWN = {'constant': _constant, 'step': _step, 'cosine': _cosine}
SCHEDULES = (*_OWN, *_OF_OPTAX)


def _of_local(local) -> dict[str, Any]:
  """Arguments of an optimiser that `local` has entries for."""
  found = {}
  if 'weight_decay' in _parameters(_constructor(local.optimizer)):
    found['weight_decay'] = local.weight_decay
  if local.optimizer == 'sgd':
    found |= dict(momentum=local.momentum or None, nesterov=local.nesterov)
  return found


def optimizer(local, learning_rate: Any) -> optax.GradientTransformation:
  """The optimiser of local steps.

  Args:
    local: The section of a config.
    learning_rate: The learning rate, maybe traced.

  Returns:
    The chain of clipping if `clip_norm` is set, weight decay unless the
    optimiser has this argument itself, and the optimiser.
  """
  given, steps = _of_local(local), []
  if local.clip_norm is not None:
    steps.append(optax.clip_by_global_norm(local.clip_norm))
  if local.weight_decay and 'weight_decay' not in given:
    steps.append(optax.add_decayed_weights(local.weight_decay))
  make = _constructor(local.optimizer)
  steps.append(make(learning_rate, **given, **local.optimizer_args))
  return optax.chain(*steps) if len(steps) > 1 else steps[0]


def schedule(local, num_rounds: int) -> Callable[[Any], Any]:
  """The learning rate by round.

  Args:
    local: The section of a config.
    num_rounds: Rounds of the run.

  Returns:
    `(round, from 0) -> learning rate`.
  """
  if local.schedule in _OWN:
    return _OWN[local.schedule](local, num_rounds)
  fn = _OF_OPTAX[local.schedule]
  given = {
      name: {int(k): v for k, v in value.items()}  # Keys are texts in a config.
      if hasattr(value, 'items')
      else value
      for name, value in local.schedule_args.items()
  }
  return fn(**{_rate(fn): local.learning_rate}, **given)


def reads_params(local) -> bool:
  """Whether steps may read or change parameters without a gradient."""
  plain = local.optimizer in ('adam', 'adamw', 'sgd')
  return bool(not plain or local.weight_decay or local.optimizer_args)


def arguments(local) -> dict[str, dict[str, inspect.Parameter]]:
  """What `optimizer_args` and `schedule_args` may hold, by section.

  Args:
    local: The section of a config, with known names.

  Returns:
    {section: {name: parameter}}.
  """
  fn = _OF_OPTAX.get(local.schedule)
  parameters = {} if fn is None else _parameters(fn)
  made = _parameters(_constructor(local.optimizer))
  left = {next(iter(made), ''), *_of_local(local), *_MASKS}
  return dict(
      optimizer_args={
          name: parameter
          for name, parameter in made.items()
          if name not in left
      },
      schedule_args={
          name: parameter for name, parameter in parameters.items()
          if name != _rate(fn)
      },
  )  # fmt: skip


def check(local) -> None:
  """Raises ValueError for arguments that optax rejects.

  Args:
    local: The section of a config, whose names are known.

  Raises:
    ValueError: In one line that names the entry.
  """
  for section, known in arguments(local).items():
    entry = section.removesuffix('_args')
    given, whose = local[section], f'{entry} {local[entry]!r}'
    options = {name: (_KINDS[section], None) for name in known}
    check_options(f'local.{section}', given, options, whose)
    for name, parameter in known.items():
      if parameter.default is parameter.empty and name not in given:
        raise ValueError(
            f'local.{section}.{name} is missing; {whose} needs it.'
        )
  if local.optimizer not in ('adam', 'adamw', 'sgd') or local.optimizer_args:
    _try('optimizer', local, lambda: _trace_step(local))
  if local.schedule not in _OWN:
    _try('schedule', local, lambda: jax.eval_shape(
        lambda round_num: schedule(local, 1)(round_num), jnp.int32(0)
    ))  # fmt: skip


def _trace_step(local) -> None:
  """Traces a step of the optimiser."""

  def step(rate, params):
    tx = optimizer(local, rate)
    return tx.update(params, tx.init(params), params)[0]

  params = dict(w=jnp.zeros((2, 3)), b=jnp.zeros(3))
  jax.eval_shape(step, jnp.float32(0.1), params)


# Python's words for an update with more arguments.
_MISSING = re.compile(r'missing \d+ required keyword-only arguments?: (.*)')


def _try(entry: str, local, trial: Callable[[], Any]) -> None:
  """Raises ValueError, naming the entry, if optax raises any error."""
  try:
    trial()
  except Exception as e:  # optax and JAX raise many types.
    reason = ' '.join(str(e).split())[:200]
    missing = _MISSING.search(reason)
    if missing:  # Such as a line search, which calls the loss.
      reason = (
          f'its step needs {missing[1]}, but a local step gives only the '
          'gradient and the parameters.'
      )
    raise ValueError(
        f'local.{entry}={local[entry]!r} cannot be used with local.{entry}_args'
        f'={shown(local[f"{entry}_args"].to_dict())}: {reason}'
    ) from e
