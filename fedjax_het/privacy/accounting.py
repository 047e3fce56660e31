"""Privacy loss of a whole run, by the library dp-accounting.

In every round in which an example is drawn, the client releases `released`
vectors for it, each clipped to an L2 norm of C, with Gaussian noise of standard
deviation sigma. Replacing one example changes the release by at most
2 C sqrt(released) in L2 norm.

The guarantee covers only these releases. FedIN also uploads parameters, running
statistics and numbers of examples without noise, so a whole run has no
guarantee. With batch norm, one example changes the features of its whole batch
of B: multiply `released` by B. The noise of `add_feature_noise` scales with
private data and gives no guarantee.
"""

from fractions import Fraction
import functools
import math

from fedjax_het.options import at_least, between, one_of, positive
from fedjax_het.privacy.gaussian import gaussian_delta

ACCOUNTANTS = ('rdp', 'pld')


def run_epsilon(
    sigma: float,
    clip: float,
    delta: float,
    *,
    rounds: int,
    sampling_rate: float = 1.0,
    released: int = 1,
    neighbours: str = 'replace',
    accountant: str = 'rdp',
) -> float:
  """Epsilon of all releases of a run together.

  Args:
    sigma: Standard deviation > 0 of the noise.
    clip: C > 0, bound on the L2 norm of each vector.
    delta: Probability in (0, 1).
    rounds: Rounds in which the client takes part.
    sampling_rate: Fraction of its examples that a client draws in a round, in
      (0, 1]. The recipient must not know which. If it knows the clients of a
      round, do not multiply by the fraction of clients per round.
    released: Vectors per example in one release: 2 for s_in and s_out.
    neighbours: 'replace': one example is replaced. 'rdp' then assumes sampling
      without replacement; 'pld' assumes Poisson sampling, with only noise
      released for examples that are not drawn. 'add_or_remove': one example is
      added or removed, with Poisson sampling.
    accountant: 'rdp', Renyi differential privacy, or 'pld', privacy loss
      distributions, which is tighter and slower.

  Returns:
    Epsilon, at least 0; infinite if the accountant finds no bound.

  Raises:
    ValueError: If an argument is out of its range.
    ImportError: If dp-accounting is not installed.

  References:
    Mironov, `Renyi Differential Privacy <https://arxiv.org/abs/1702.07476>`_;
    Wang, Balle, Kasiviswanathan, `Subsampled Renyi Differential Privacy
    <https://arxiv.org/abs/1808.00087>`_, Theorem 27; Koskela, Jalko, Honkela,
    `Computing Tight Differential Privacy Guarantees Using FFT
    <https://arxiv.org/abs/1906.03049>`_.
  """
  positive(sigma=sigma, clip=clip)
  between(0, 1, above=True, below=True, delta=delta)
  between(0, 1, above=True, sampling_rate=sampling_rate)
  at_least(1, rounds=rounds, released=released)
  one_of('accountant', accountant, ACCOUNTANTS)
  one_of('neighbours', neighbours, ('replace', 'add_or_remove'))
  dp = _dp_accounting()
  replace = neighbours == 'replace'
  relation = dp.NeighboringRelation
  relation = relation.REPLACE_ONE if replace else relation.ADD_OR_REMOVE_ONE
  ratio = sigma / (clip * math.sqrt(released))
  if accountant == 'pld':
    # With REPLACE_ONE, this accountant itself doubles the sensitivity.
    found = dp.pld.PLDAccountant(relation)
    event = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(ratio))
  elif replace:
    found = dp.rdp.RdpAccountant(neighboring_relation=relation)
    share = Fraction(sampling_rate).limit_denominator(10**6)
    if share < sampling_rate * (1 - 1e-12):  # Never fewer than are drawn.
      share = Fraction(math.ceil(sampling_rate * 10**6), 10**6)
    event = dp.SampledWithoutReplacementDpEvent(
        share.denominator, share.numerator, dp.GaussianDpEvent(ratio / 2)
    )
  else:
    found = dp.rdp.RdpAccountant(neighboring_relation=relation)
    event = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(ratio))
  return float(found.compose(event, rounds).get_epsilon(delta))


def gaussian_epsilon(
    sigma: float, clip: float, delta: float, sensitivity_factor: float = 2.0
) -> float:
  """The exact epsilon of one release, the inverse of `gaussian_delta`.

  T releases of one vector, or one release of T vectors, are one release with
  sigma / sqrt(T).

  Args:
    sigma: Standard deviation > 0 of the noise.
    clip: C > 0, bound on the L2 norm of what is released.
    delta: Probability in (0, 1).
    sensitivity_factor: Sensitivity in units of C.

  Returns:
    Epsilon, rounded up by less than 1e-12 relative; 0 if delta is reached
    without any privacy loss.

  Raises:
    ValueError: If an argument is out of its range.
  """
  between(0, 1, above=True, below=True, delta=delta)
  delta_at = functools.partial(
      gaussian_delta, sigma, clip, sensitivity_factor=sensitivity_factor
  )
  low, high = 0.0, 1.0
  while delta_at(high) > delta:
    low, high = high, 2 * high
  while high - low > 1e-13 * high and high > 1e-30:
    middle = (low + high) / 2
    if delta_at(middle) > delta:
      low = middle
    else:
      high = middle
  return high if high > 1e-30 else 0.0


def _dp_accounting():
  try:
    import dp_accounting
    import dp_accounting.pld
    import dp_accounting.rdp
  except ImportError as error:
    raise ImportError(
        'Privacy accounting needs dp-accounting: pip install '
        "'fedjax_het[privacy]'."
    ) from error
  return dp_accounting
