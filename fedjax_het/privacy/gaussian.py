"""Noise of the Gaussian mechanism for (epsilon, delta) differential privacy.

All functions are for ONE release of one clipped quantity. A federated run
releases features in every round to every recipient. No function here accounts
for that composition: the guarantee of the whole run is weaker. Compute it with
`privacy.run_epsilon` before you claim a guarantee.
"""

import math

from fedjax_het.options import between, positive


def gaussian_sigma(clip, epsilon, delta, sensitivity_factor=2.0):
  """Standard deviation of the classical Gaussian mechanism.

  sigma = sensitivity_factor C sqrt(2 ln(1.25 / delta)) / epsilon, as in the
  appendix of FedIN's journal version. Limits:

  - The theorem holds for epsilon < 1 only. FedIN's example, C = 0.1,
    epsilon = 10, delta = 1e-6, is outside: the formula gives sigma = 0.106,
    whose exact delta is 1.9e-6. Use `analytic_gaussian_sigma` there.
  - The paper prints 0.127 for that example, the value with a base-2 logarithm.
  - Every released vector must have an L2 norm of at most C. FedIN does not
    enforce it: call `clip_features` before adding the noise. FedIN's noise of
    0.8 standard deviations, without clipping, has no such guarantee.
  - One release only; see the module docstring on composition.

  Args:
    clip: C > 0, bound on the L2 norm of what is released.
    epsilon: Privacy loss > 0.
    delta: Probability in (0, 1).
    sensitivity_factor: Sensitivity in units of C: 2 if neighbouring data sets
      differ by replacing an example, 1 if by adding or removing one.

  Returns:
    sigma, a float in the unit of `clip`.

  Raises:
    ValueError: If an argument is outside its range.

  References:
    Dwork and Roth, `The Algorithmic Foundations of Differential Privacy
    <https://doi.org/10.1561/0400000042>`_, 2014, Theorem A.1.
  """
  _check_arguments(clip, epsilon, delta, sensitivity_factor)
  sensitivity = sensitivity_factor * clip
  return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def analytic_gaussian_sigma(clip, epsilon, delta, sensitivity_factor=2.0):
  """Smallest standard deviation for (epsilon, delta) privacy, any epsilon.

  Solves `gaussian_delta(sigma) = delta` by bisection. The result is exact;
  `gaussian_sigma` is an upper bound for epsilon < 1 and not valid otherwise.
  The same limits on clipping and composition apply.

  Args:
    clip: C > 0, bound on the L2 norm of what is released.
    epsilon: Privacy loss > 0.
    delta: Probability in (0, 1).
    sensitivity_factor: Sensitivity in units of C.

  Returns:
    sigma, a float in the unit of `clip`, rounded up by less than 1e-12
    relative.

  Raises:
    ValueError: If an argument is outside its range.

  References:
    Balle and Wang, `Improving the Gaussian Mechanism
    <https://arxiv.org/abs/1805.06530>`_, ICML 2018, Theorem 8.
  """
  _check_arguments(clip, epsilon, delta, sensitivity_factor)
  low = high = 1.0
  while _delta_of_ratio(high, epsilon) > delta:
    high *= 2
  while _delta_of_ratio(low, epsilon) <= delta:
    low /= 2
  while high - low > 1e-13 * high:
    middle = (low + high) / 2
    if _delta_of_ratio(middle, epsilon) > delta:
      low = middle
    else:
      high = middle
  return high * sensitivity_factor * clip


def gaussian_delta(sigma, clip, epsilon, sensitivity_factor=2.0):
  """The exact delta of the Gaussian mechanism for a given epsilon.

  With D the sensitivity, delta = Phi(D / (2 sigma) - epsilon sigma / D)
  - e^epsilon Phi(-D / (2 sigma) - epsilon sigma / D).

  Args:
    sigma: Standard deviation > 0 of the noise.
    clip: C > 0, bound on the L2 norm of what is released.
    epsilon: Privacy loss > 0.
    sensitivity_factor: Sensitivity in units of C.

  Returns:
    delta, a float in [0, 1].

  Raises:
    ValueError: If an argument is outside its range.

  References:
    Balle and Wang, `Improving the Gaussian Mechanism
    <https://arxiv.org/abs/1805.06530>`_, ICML 2018, Theorem 8.
  """
  positive(sigma=sigma)
  _check_arguments(clip, epsilon, 0.5, sensitivity_factor)
  return _delta_of_ratio(sigma / (sensitivity_factor * clip), epsilon)


def _delta_of_ratio(ratio, epsilon):
  """Delta for `ratio` = sigma / sensitivity; in log space for the tails."""
  from scipy import special  # The import takes a tenth of the time of JAX's.

  log_first = special.log_ndtr(0.5 / ratio - epsilon * ratio)
  log_second = epsilon + special.log_ndtr(-0.5 / ratio - epsilon * ratio)
  return math.exp(log_first) * -math.expm1(min(log_second - log_first, 0.0))


def _check_arguments(clip, epsilon, delta, sensitivity_factor):
  positive(clip=clip, epsilon=epsilon, sensitivity_factor=sensitivity_factor)
  between(0, 1, above=True, below=True, delta=delta)
