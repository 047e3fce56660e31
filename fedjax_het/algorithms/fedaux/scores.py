"""FedAUX's certainty scores: a logistic regression, maybe with noise.

References:
  Chaudhuri, Monteleoni, Sarwate, `Differentially Private Empirical Risk
  Minimization <https://arxiv.org/abs/0912.0071>`_, JMLR 2011, Corollary 8: the
  sensitivity of a regularised mean loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import ClientData, Examples
from fedjax_het.engine.local import map_examples
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.privacy.gaussian import gaussian_sigma

# Newton's method converges in fewer steps; further ones change nothing.
_STEPS = 25
_HALVINGS = 12
# How far a float32 objective of the order of 1 may rise by rounding.
_ROUNDING = 1e-6
# What the authors' code adds to every score, so that no sum of them is 0.
LEAST_SCORE = 1e-8


class Scorer(NamedTuple):
  """A client's logistic regression.

  Attributes:
    coefficients: [D] float32, w.
    intercept: [] float32, b.
  """

  coefficients: jax.Array
  intercept: jax.Array


def split_public(num_public: int, share: float) -> tuple[np.ndarray, ...]:
  """Splits the public set by a fixed rule.

  Args:
    num_public: P, at least 2.
    share: The share of D_distill.

  Returns:
    Positions of D^- and of D_distill, int32, ascending and disjoint, each at
    least one. Those of D^- are evenly spaced.
  """
  num = min(max(num_public - round(share * num_public), 1), num_public - 1)
  negatives = (2 * np.arange(num) + 1) * num_public // (2 * num)
  rest = np.setdiff1d(np.arange(num_public), negatives)
  return negatives.astype(np.int32), rest.astype(np.int32)


def subset(public: ClientData, positions: np.ndarray) -> ClientData:
  """The public examples at some positions, never augmented."""
  return public.replace(
      index=public.index[positions], size=jnp.int32(len(positions))
  ).unaugmented()


def extract_features(
    model: BlockModel, variables: Variables, examples: Examples
) -> jax.Array:
  """h_0(x), the inputs of the last block in eval mode.

  Args:
    model: The architecture.
    variables: h_0's.
    examples: M examples.

  Returns:
    [M, D] float32; rows of padding are arbitrary.
  """

  def features(batch):
    h, _ = model.apply(
        variables, batch.x, stop=len(model.blocks) - 1, mask=batch.mask
    )
    return h.reshape(len(h), -1).astype(jnp.float32)

  return map_examples(features, examples)


def fit_scorer(x, own, real, l2: float, intercept: bool) -> Scorer:
  """Minimises the logistic loss by Newton's method with halved steps.

  The objective is

    1/n sum_i log(1 + exp(-t_i (w x_i + b))) + l2/2 ||w||^2,

  with t_i = 1 for the client's own examples and -1 for the others. The
  intercept is not penalised, as in the authors' code.

  Args:
    x: [M, D] float32.
    own: [M] bool, which rows are the client's own.
    real: [M] bool, False for padding; n rows are real.
    l2: Strength of the penalty, above 0.
    intercept: Whether there is b; else b is 0.

  Returns:
    The regression.
  """
  share = real / jnp.sum(real)
  t = jnp.where(own, 1.0, -1.0)
  column = jnp.where(real, float(intercept), 0.0)[:, None]
  x = jnp.concatenate([jnp.where(real[:, None], x, 0.0), column], axis=1)
  penalty = jnp.full(x.shape[1], l2).at[-1].set(0.0 if intercept else l2)

  def objective(z, theta):
    loss = jnp.sum(share * jax.nn.softplus(-t * z))
    return loss + jnp.sum(penalty * theta**2) / 2

  def step(_, theta):
    z = jnp.matmul(x, theta, precision='highest')
    p = jax.nn.sigmoid(z)
    # grad = sum_i (p_i - [t_i = 1]) x_i / n + l2 w.
    gap = share * (p - own)
    grad = jnp.matmul(gap, x, precision='highest') + penalty * theta
    # H = sum_i p_i (1 - p_i) x_i x_i^T / n + l2 I.
    curvature = (share * p * (1 - p))[:, None]
    hessian = jnp.matmul(x.T, curvature * x, precision='highest')
    hessian += jnp.diag(penalty)
    move = -jax.scipy.linalg.solve(hessian, grad, assume_a='pos')
    along = jnp.matmul(x, move, precision='highest')
    # The longest step of 1, 1/2, 1/4, ... that does not raise the objective.
    lengths = 0.5 ** jnp.arange(_HALVINGS)
    values = jax.vmap(lambda a: objective(z + a * along, theta + a * move))(
        lengths
    )
    fits = values <= objective(z, theta) + _ROUNDING
    length = jnp.where(jnp.any(fits), lengths[jnp.argmax(fits)], 0.0)
    return theta + length * move

  theta = jax.lax.fori_loop(0, _STEPS, step, jnp.zeros(x.shape[1]))
  return Scorer(theta[:-1], theta[-1])


def noise_scale(num_examples, l2: float, epsilon: float, delta: float):
  """sigma, the standard deviation of the noise on a client's regression.

  sigma^2 = 2 ln(1.25 / delta) Delta^2 / epsilon^2, with the sensitivity
  Delta = 2 / (n l2).

  Args:
    num_examples: n, examples that the regression is fitted to; maybe traced.
    l2: Strength of the penalty.
    epsilon: Privacy loss, in (0, 1).
    delta: Probability in (0, 1).

  Returns:
    sigma, in the unit of the coefficients.
  """
  # For rows of norm 1 and a mean loss; 2 is `gaussian_sigma`'s own factor.
  return gaussian_sigma(1.0, epsilon, delta) / (num_examples * l2)


def add_noise(key, scorer: Scorer, sigma, intercept: bool) -> Scorer:
  """Adds N(0, sigma^2) to w, and to b if there is one."""
  w_key, b_key = jax.random.split(key)
  w, b = scorer
  w += sigma * jax.random.normal(w_key, w.shape)
  if intercept:
    b += sigma * jax.random.normal(b_key)
  return Scorer(w, b)


def score(scorer: Scorer, x) -> jax.Array:
  """s(x), the probability that an example is the client's.

  Args:
    scorer: The client's regression.
    x: [P, D] features, divided as those it was fitted to.

  Returns:
    [P] float32, above 0 and at most 1 + 1e-8.
  """
  z = jnp.matmul(x, scorer.coefficients, precision='highest')
  return jax.nn.sigmoid(z + scorer.intercept) + LEAST_SCORE
