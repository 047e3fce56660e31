"""The server's part of averaging: the weighted mean and an optimizer step.

With D the weighted mean of the clients' changes, the server takes an optax
step on the gradient -D. Plain averaging is SGD with learning rate 1,

  sgd      b <- beta b + D,      x <- x + lr b

(FedAvgM for beta > 0); the adaptive methods are, elementwise,

           m <- beta m + (1 - beta) D,      x <- x + lr m / (sqrt(v) + tau)
  adagrad  v <- v + D^2
  adam     v <- b2 v + (1 - b2) D^2
  yogi     v <- v - (1 - b2) D^2 sign(v - D^2)

from m = 0 and v = tau^2, with b2 = 0.99.

Optax's forms differ. `optax.adam` starts at v = 0 and corrects the bias of m
and v: it is the form here with lr times sqrt(1 - b2^t) / (1 - beta^t) in place
of lr, and eps sqrt(1 - b2^t) in place of tau. `optax.yogi` corrects the bias,
too, and starts at m = v = 1e-6. `optax.adagrad` divides by sqrt(v + eps).

References:
  Reddi et al., `Adaptive Federated Optimization
  <https://arxiv.org/abs/2003.00295>`_, ICLR 2021, Algorithm 2. Hsu, Qi and
  Brown, `Measuring the Effects of Non-Identical Data Distribution for Federated
  Visual Classification <https://arxiv.org/abs/1909.06335>`_, 2019, for FedAvgM.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.options import between, one_of, positive

# b2, the decay of v; the paper uses one value throughout.
SECOND_MOMENT_DECAY = 0.99


def weighted_mean(
    sums: Iterable[tuple[Mapping[str, Any], Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The weighted mean of each key over the clients that sent it.

  Args:
    sums: One (total, weight) of each group of senders. `total` is {key: tree},
      sums of coefficient * value; groups may have different keys. `weight`
      is the sum of the coefficients: one array for all keys, or {key: prefix
      of the key's tree} of arrays. An array may have only the leading axes of
      a leaf and is broadcast over the others: [] for a block, [C] for classes.

  Returns:
    The means, {key: tree}, 0 where no client sent, and whether any client sent,
    {key: bool arrays like `weight`}.
  """
  total, weight = {}, {}
  for sent, coefficient in sums:
    for key, tree in sent.items():
      term = (
          tree,
          coefficient[key] if isinstance(coefficient, Mapping) else coefficient,
      )
      if key in total:
        term = jax.tree.map(jnp.add, (total[key], weight[key]), term)
      total[key], weight[key] = term

  def mean(w, tree):
    # sum_k p_k d_k / sum_k p_k.
    some, safe = w > 0, jnp.where(w > 0, w, 1.0)

    def divided(leaf):
      return jnp.where(_over(some, leaf), leaf / _over(safe, leaf), 0.0)

    return jax.tree.map(divided, tree)

  return (
      {key: jax.tree.map(mean, weight[key], total[key]) for key in total},
      {key: jax.tree.map(lambda w: w > 0, weight[key]) for key in weight},
  )


def _over(array, leaf):
  """Appends axes of size 1 to `array`, up to the rank of `leaf`."""
  array = jnp.asarray(array)
  if not array.ndim:  # A reshape would change the last bits of the division.
    return array
  return array.reshape(array.shape + (1,) * (leaf.ndim - array.ndim))


def init_server_step(
    tx: optax.GradientTransformation, params: Mapping[str, Any]
) -> dict[str, Any]:
  """The initial state of `server_step`.

  Args:
    tx: The optimiser.
    params: {key: tree}, the server's parameters.

  Returns:
    {key: the optimiser's state}; it holds no array if `tx` is stateless.
  """
  return {key: tx.init(tree) for key, tree in params.items()}


def server_step(
    tx: optax.GradientTransformation,
    params: Mapping[str, Any],
    opt_state: Mapping[str, Any],
    mean: Mapping[str, Any],
    sent: Mapping[str, jax.Array],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Takes an optimizer step along the mean change of each key separately.

  Args:
    tx: The optimiser. If it takes norms, each is over a single key.
    params: {key: tree}, x.
    opt_state: As of `init_server_step`.
    mean: {key: tree} for some of the keys, D.
    sent: {key: bool arrays} for the same keys, as `weighted_mean` returns
      them: [] for a key, or arrays with the leading or all axes of a leaf.
      Entries that no client sent keep their values and moments; a key without
      any sent entry keeps its step count, too.

  Returns:
    The new parameters and the new state.
  """

  def step(key):
    old = params[key], opt_state[key]
    # x <- x + tx(-D).
    gradient = jax.tree.map(jnp.negative, mean[key])
    updates, state = tx.update(gradient, opt_state[key], params[key])
    new = optax.apply_updates(params[key], updates), state
    moves = _moves(tx, sent[key], *old)
    return jax.tree.map(lambda m, n, o: jnp.where(m, n, o), moves, new, old)

  stepped = {key: step(key) for key in mean}
  return (
      {**params, **{key: tree for key, (tree, _) in stepped.items()}},
      {**opt_state, **{key: state for key, (_, state) in stepped.items()}},
  )


def _moves(tx: optax.GradientTransformation, sent, params, opt_state):
  """Masks of the parameters and state that a step on one key changes.

  Args:
    tx: The optimiser.
    sent: Bool arrays, a prefix of `params`.
    params: The key's tree.
    opt_state: The state of `tx` for it.

  Returns:
    Bool arrays that broadcast to the leaves, a tree like (params, opt_state).
  """
  entries = jax.tree.map(
      lambda some, tree: jax.tree.map(lambda leaf: _over(some, leaf), tree),
      sent,
      params,
  )
  anything = jnp.zeros((), bool)  # A block without parameters sends nothing.
  for some in jax.tree.leaves(sent):
    anything |= jnp.any(some)
  # A moment changes where its entry does; a step count, if any entry does.
  state = optax.tree_utils.tree_map_params(
      tx,
      lambda _, some: some,
      opt_state,
      entries,
      transform_non_params=lambda _: anything,
  )
  return entries, state


class Optimized(NamedTuple):
  """A server's tree with the state of its optimiser, if that has any.

  Attributes:
    variables: The tree, such as `Variables` keyed by shared key.
    opt_state: {key: state}, see `init_server_step`.
  """

  variables: Any
  opt_state: dict[str, Any]


def with_state(variables: Any, opt_state: Mapping[str, Any]) -> Any:
  """`Optimized`, or `variables` alone if the optimiser has no state."""
  if not jax.tree.leaves(opt_state):
    return variables
  return Optimized(variables, dict(opt_state))


def server_variables(server: Any) -> Any:
  """The server's tree, without its optimiser's state."""
  return server.variables if isinstance(server, Optimized) else server


def state_of(
    tx: optax.GradientTransformation, server: Any, params: Mapping[str, Any]
) -> dict[str, Any]:
  """The optimiser's state of a server that `with_state` returned.

  Args:
    tx: The optimiser.
    server: The server.
    params: {key: tree}, its parameters.

  Returns:
    {key: state}; it holds no array if `tx` is stateless.
  """
  if isinstance(server, Optimized):
    return server.opt_state
  return init_server_step(tx, params)


class Moments(NamedTuple):
  """State of an adaptive server optimiser.

  Attributes:
    m: Running mean of the gradients, a tree like the parameters.
    v: Second moments of the gradients, a tree like the parameters.
  """

  m: Any
  v: Any


def _adagrad(v, square):
  return v + square


def _adam(v, square):
  return SECOND_MOMENT_DECAY * v + (1 - SECOND_MOMENT_DECAY) * square


def _yogi(v, square):
  return v - (1 - SECOND_MOMENT_DECAY) * square * jnp.sign(v - square)


_SECOND_MOMENTS = dict(adam=_adam, yogi=_yogi, adagrad=_adagrad)
SERVER_OPTIMIZERS = ('sgd', *_SECOND_MOMENTS)


def _adaptive(
    next_v, learning_rate: float, momentum: float, eps: float
) -> optax.GradientTransformation:
  """Algorithm 2 of Reddi et al. with one rule for v."""

  def init(params):
    # m = 0, v = tau^2.
    return Moments(
        jax.tree.map(jnp.zeros_like, params),
        jax.tree.map(lambda x: jnp.full_like(x, eps**2), params),
    )

  def update(gradient, state, params=None):
    del params
    # m <- beta m + (1 - beta) g.
    m = jax.tree.map(
        lambda m, g: momentum * m + (1 - momentum) * g, state.m, gradient
    )
    # v <- rule(v, g^2).
    v = jax.tree.map(lambda v, g: next_v(v, g * g), state.v, gradient)
    # -lr m / (sqrt(v) + tau).
    updates = jax.tree.map(
        lambda m, v: -learning_rate * m / (jnp.sqrt(v) + eps), m, v
    )
    return updates, Moments(m, v)

  return optax.GradientTransformation(init, update)


def make_server_optimizer(
    name: str = 'sgd',
    learning_rate: float = 1.0,
    momentum: float | None = None,
    eps: float = 1e-3,
) -> optax.GradientTransformation:
  """The server's optimiser, from an algorithm's options.

  Args:
    name: 'sgd', 'adam', 'yogi' or 'adagrad'.
    learning_rate: lr, the option `server_lr`.
    momentum: beta in [0, 1), the option `server_momentum`; None for 0.9 with
      'adam' and 'yogi', else 0.
    eps: tau, the option `server_eps`, of the adaptive methods.

  Returns:
    The transformation, which is stateless for 'sgd' without momentum.

  Raises:
    ValueError: If an option is unknown, out of range or not finite.
  """
  one_of('server_optimizer', name, SERVER_OPTIMIZERS)
  positive(server_lr=learning_rate, server_eps=eps)
  if momentum is None:
    momentum = 0.9 if name in ('adam', 'yogi') else 0.0
  between(0, 1, below=True, server_momentum=momentum)
  if name == 'sgd':
    return optax.sgd(learning_rate, momentum or None)
  return _adaptive(_SECOND_MOMENTS[name], learning_rate, momentum, eps)


def _from_options(
    *,
    server_lr: float = 1.0,
    server_optimizer: str = 'sgd',
    server_momentum: float | None = None,
    server_eps: float = 1e-3,
) -> optax.GradientTransformation:
  """`make_server_optimizer` with an algorithm's option names and defaults."""
  return make_server_optimizer(
      server_optimizer, server_lr, server_momentum, server_eps
  )


def takes_server_options(**defaults) -> Callable[[Callable], Callable]:
  """A decorator for functions that need the server's optimiser.

  The function has a keyword `tx`, the transformation. Its callers give the
  options `server_lr`, `server_optimizer`, `server_momentum` and `server_eps`
  instead, from which `make_server_optimizer` makes `tx`. They may also give
  `tx` itself.

  Args:
    **defaults: The method's defaults of these options, where they differ.

  Returns:
    The decorator.
  """
  optimizer = functools.partial(_from_options, **defaults)
  options = inspect.signature(optimizer).parameters

  def take(function):
    own = inspect.signature(function)

    @functools.wraps(function)
    def taking(*args, tx=None, **given):
      if tx is None:
        mine = {name: given.pop(name) for name in options if name in given}
        tx = optimizer(**mine)
      return function(*args, tx=tx, **given)

    others = [p for name, p in own.parameters.items() if name != 'tx']
    taking.__signature__ = own.replace(
        parameters=[*others, *options.values()]
    )
    taking.__annotations__ = {
        **{k: v for k, v in function.__annotations__.items() if k != 'tx'},
        **{name: option.annotation for name, option in options.items()},
    }
    return taking

  return take
