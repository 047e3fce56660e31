"""Privacy accounting of a run, against closed forms and published values."""

import math
import pathlib

import numpy as np
import pytest
from scipy import fft, optimize, special, stats

from fedjax_het import privacy

PAGE = pathlib.Path(__file__).parents[2] / 'docs/howto/analyses.md'
# The table of that page: the paper's example.
DOCUMENTED = [10.0, 10.25, 15.68, 266.90, 75.64, 4.96]
EXAMPLE = dict(rounds=50, sampling_rate=0.032, released=2)


def test_epsilon_is_the_inverse_of_delta():
  for sigma, delta in ((0.106, 1e-6), (0.5, 1e-5), (3.0, 1e-3)):
    epsilon = privacy.gaussian_epsilon(sigma, 0.1, delta)
    if epsilon:
      found = privacy.gaussian_delta(sigma, 0.1, epsilon)
      assert found == pytest.approx(delta, rel=1e-8)
  sigma = privacy.analytic_gaussian_sigma(0.1, 10.0, 1e-6)
  assert privacy.gaussian_epsilon(sigma, 0.1, 1e-6) == pytest.approx(10)
  # delta(0) is 0.004, so that delta alone covers the release.
  assert privacy.gaussian_epsilon(1.0, 0.005, 0.01) == 0


def test_the_papers_example_is_not_ten():
  sigma = privacy.gaussian_sigma(0.1, 10.0, 1e-6)
  assert sigma == pytest.approx(0.10598, abs=1e-5)
  assert 0.2 * math.sqrt(2 * math.log2(1.25e6)) / 10 == pytest.approx(
      0.1273, abs=1e-4
  )
  assert privacy.gaussian_epsilon(sigma, 0.1, 1e-6) == pytest.approx(
      10.25, abs=0.01
  )


@pytest.fixture(autouse=True)
def accountants(request):
  if 'dp' in request.node.name:
    pytest.importorskip('dp_accounting')


def test_dp_of_whole_batches_is_that_of_one_gaussian():
  """T releases of k vectors equal one with sigma / sqrt(T k)."""
  for rounds, released in ((1, 1), (5, 2)):
    want = privacy.gaussian_epsilon(
        0.3 / math.sqrt(rounds * released), 0.1, 1e-5
    )
    options = dict(rounds=rounds, released=released)
    pld = privacy.run_epsilon(0.3, 0.1, 1e-5, accountant='pld', **options)
    assert pld == pytest.approx(want, rel=1e-3) and pld >= want
    rdp = privacy.run_epsilon(0.3, 0.1, 1e-5, **options)
    assert want < rdp < 1.25 * want


def moments(sigma, q, steps, delta):
  """Epsilon by the formula of Abadi et al., and with a tighter last step."""
  best = []
  for order in range(2, 65):
    k = np.arange(order + 1)
    log_a = special.logsumexp(
        np.log(special.binom(order, k)) + (order - k) * np.log1p(-q)
        + k * np.log(q) + (k * k - k) / (2 * sigma**2)
    )  # fmt: skip
    loss = steps * log_a / (order - 1)
    tight = np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    best.append((loss + math.log(1 / delta) / (order - 1), loss + tight))
  return np.min(best, axis=0)


@pytest.mark.parametrize(
    'sigma, q, steps, published',
    [
        # Abadi et al. 2016, Fig. 2: q = 0.01, sigma = 4, 10,000 steps.
        (4.0, 0.01, 10000, 1.26),
        # Bu et al. 2020, Fig. 4: MNIST, batches of 256, 20 epochs.
        (1.3, 256 / 60000, 20 * 60000 // 256, 1.34),
    ],
)
def test_dp_of_sampling_is_the_published_one(sigma, q, steps, published):
  classical, tight = moments(sigma, q, steps, 1e-5)
  assert classical == pytest.approx(published, abs=0.01)
  options = dict(
      rounds=steps, sampling_rate=q, neighbours='add_or_remove'
  )
  rdp = privacy.run_epsilon(sigma, 1.0, 1e-5, **options)
  assert rdp == pytest.approx(tight, rel=0.01)
  pld = privacy.run_epsilon(sigma, 1.0, 1e-5, accountant='pld', **options)
  assert 0.8 * rdp < pld < rdp


def test_dp_of_samples_without_replacement():
  """Epsilon grows with the sampling rate; only the ratio sigma / C matters."""
  def epsilon(rate, scale=1.0):
    return privacy.run_epsilon(
        2.0 * scale, scale, 1e-5, rounds=3, sampling_rate=rate
    )

  # Rates below one in a million are rounded up, not to 0.
  rare, one = (
      privacy.run_epsilon(
          0.1, 0.1, 1e-6, rounds=50, released=2, sampling_rate=rate
      )
      for rate in (1e-7, 1e-6)
  )
  assert rare == one > 1
  found = [epsilon(rate) for rate in (0.01, 0.1, 1.0)]
  assert found == sorted(found) and found[0] < 0.5 * found[2]
  assert epsilon(0.1, 7.0) == pytest.approx(found[1])
  want = privacy.gaussian_epsilon(2.0 / math.sqrt(3), 1.0, 1e-5)
  assert want < found[2] < 1.25 * want


def test_dp_of_hardly_any_noise_is_not_counted_by_pld():
  """It would need 75 GiB of memory here."""
  from launch import privacy as command

  rows = command.rows(
      1e-4, 0.1, 1e-6, rounds=50, sampling_rate=0.03, released=2
  )
  assert rows[-1][-1] == '-' and float(rows[-2][-1]) > 1e6


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(rounds=0), 'rounds must be at least 1'),
        (dict(sampling_rate=0.0), 'sampling_rate must be above 0'),
        (dict(sampling_rate=1.5), 'at most 1'),
        (dict(released=0), 'released must be at least 1'),
        (dict(accountant='rpd'), "accountant 'rpd'; did you mean 'rdp'"),
        (dict(neighbours='none'), "Unknown neighbours 'none'"),
        (dict(sigma=0.0), 'sigma must be above 0'),
        (dict(delta=1.0), 'delta must be above 0 and below 1'),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
  given = {**dict(sigma=1.0, clip=1.0, delta=1e-5, rounds=1), **options}
  with pytest.raises(ValueError, match=message):
    privacy.run_epsilon(**given)


def test_without_the_library_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'dp_accounting', None)
  with pytest.raises(ImportError, match=r'fedjax_het\[privacy\]'):
    privacy.run_epsilon(1.0, 1.0, 1e-5, rounds=1)


def documented_rows():
  """The cells of the page's table of epsilons."""
  lines = PAGE.read_text(encoding='utf-8').splitlines()
  start = lines.index(
      '| what is released for an example | counted by | epsilon |'
  )
  rows = []
  for line in lines[start + 2 :]:
    if not line:
      return rows
    rows.append([cell.strip() for cell in line.strip('|').split('|')])


def test_dp_table_of_the_papers_setting():
  """The command prints the page's table, up to 1 % in the sampled rows."""
  from launch import privacy as command

  sigma = privacy.gaussian_sigma(0.1, 10.0, 1e-6)
  table = command.rows(sigma, 0.1, 1e-6, **EXAMPLE)
  assert [row[:2] for row in table[1:]] == [
      row[:2] for row in documented_rows()
  ]
  values = [float(row[-1]) for row in table[1:]]
  assert values[:4] == DOCUMENTED[:4]
  assert values[4:] == pytest.approx(DOCUMENTED[4:], rel=0.01)


def of_renyi(loss, order, delta):
  """Epsilon from Renyi differential privacy of an order (Canonne et al.)."""
  return loss + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)


def test_dp_of_whole_batches_is_the_closed_form():
  """RDP of T Gaussian releases is T order mu^2 / 2, mu = 2 C / sigma."""
  orders = np.linspace(1.02, 200, 100_000)
  for sigma, rounds in ((0.106, 50), (2.0, 3)):
    mu = 2 * 0.1 / sigma
    want = of_renyi(rounds * orders * mu**2 / 2, orders, 1e-6).min()
    got = privacy.run_epsilon(sigma, 0.1, 1e-6, rounds=rounds)
    # The library tries fewer orders.
    assert want - 1e-6 < got < 1.01 * want


def without_replacement(mu, q, steps, delta):
  """Epsilon by Theorem 27 of Wang et al., at the orders 2 to 20."""
  found = []
  for order in range(2, 21):
    j = np.arange(3, order + 1)
    terms = [
        0.0,
        2 * np.log(q) + np.log(special.binom(order, 2))
        + min(np.log(4 * np.expm1(mu**2)), np.log(2) + mu**2),
        *np.log(2) + j * np.log(q) + np.log(special.binom(order, j))
        + j * (j - 1) * mu**2 / 2,
    ]  # fmt: skip
    loss = steps * special.logsumexp(terms) / (order - 1)
    found.append(of_renyi(loss, order, delta))
  return min(found)


def by_chance(mu, q, steps, delta, width=1e-3, size=2**18):
  """Epsilon from the distribution of the privacy loss, by FFT.

  The replaced example adds a vector v or -v with probability q and is otherwise
  noise alone: (1 - q) N(0, 1) + q N(mu / 2, 1) against the same with -mu / 2.
  """
  x = np.linspace(-10, 12, 400_000)
  above, below = (
      np.log1p(q * np.expm1(shift * x - shift**2 / 2))
      for shift in (mu / 2, -mu / 2)
  )
  masses = stats.norm.pdf(x) * np.exp(above)
  bins = np.rint((above - below) / width).astype(int) % size
  masses = np.bincount(bins, masses / masses.sum(), size)
  masses = fft.irfft(fft.rfft(masses) ** steps, size)
  losses = fft.fftfreq(size, 1 / size) * width

  def excess(epsilon):
    above = losses > epsilon
    return masses[above] @ -np.expm1(epsilon - losses[above]) - delta

  return optimize.brentq(excess, 0, 50)


def test_the_documented_epsilons_follow_from_the_formulas():
  """Without dp-accounting, by other programs for the same definitions."""
  assert [float(row[2]) for row in documented_rows()] == DOCUMENTED
  sigma = privacy.gaussian_sigma(0.1, 10.0, 1e-6)
  formula = 2 * 0.1 * math.sqrt(2 * math.log(1.25e6)) / sigma

  def exact(mu):  # The formula of Balle and Wang, for sensitivity mu.
    def excess(epsilon):
      first, second = stats.norm.logcdf([mu / 2 - epsilon / mu,
                                         -mu / 2 - epsilon / mu])  # fmt: skip
      return np.exp(first) - np.exp(epsilon + second) - 1e-6
    return optimize.brentq(excess, 0, 500)

  one = 2 * 0.1 / sigma
  both = one * math.sqrt(2)
  want = [
      formula, exact(one), exact(both), exact(both * math.sqrt(50)),
      without_replacement(both, 0.032, 50, 1e-6),
      by_chance(both, 0.032, 50, 1e-6),
  ]  # fmt: skip
  assert want[:5] == pytest.approx(DOCUMENTED[:5], abs=0.005)
  assert want[5] == pytest.approx(DOCUMENTED[5], abs=0.01)
