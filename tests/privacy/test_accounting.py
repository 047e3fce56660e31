"""Privacy accounting of a run, against closed forms and published values."""

import math

import numpy as np
import pytest
from scipy import special

from fedjax_het import privacy


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

  found = [epsilon(rate) for rate in (0.01, 0.1, 1.0)]
  assert found == sorted(found) and found[0] < 0.5 * found[2]
  assert epsilon(0.1, 7.0) == pytest.approx(found[1])
  want = privacy.gaussian_epsilon(2.0 / math.sqrt(3), 1.0, 1e-5)
  assert want < found[2] < 1.25 * want


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


def test_dp_table_of_the_papers_setting():
  from launch import privacy as command

  sigma = privacy.gaussian_sigma(0.1, 10.0, 1e-6)
  table = command.rows(
      sigma, 0.1, 1e-6, rounds=50, sampling_rate=0.032, released=2
  )
  values = [float(row[-1]) for row in table[1:]]
  assert values[:2] == [10.0, 10.25]
  # Over all rounds, with both features, there is no useful guarantee.
  assert values[3] > 200 and values[2] < values[4] < values[3]
  assert 'not valid from 1 on' in table[1][1]
