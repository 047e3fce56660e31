"""One checker of numbers for all methods, with one wording."""

import math

import numpy as np
import pytest

from fedjax_het import options
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.options import keyword_options
from tests.tiny import one_model_federation, tiny_federation

# What a method needs to be built at all.
NEEDED = dict(fedmd=dict(num_public=20), fedgkt=dict(sizes=np.full(6, 6)))
NEEDED['fedin'] = NEEDED['fedgkt']


def floats():
  """(method, option) of every option that may be a float."""
  for name, constructor in ALGORITHMS.items():
    for option, (kind, _) in keyword_options(constructor).items():
      if kind in (float, float | None):
        yield name, option


@pytest.mark.parametrize(('name', 'option'), floats())
@pytest.mark.parametrize(
    'value', [math.nan, math.inf, -math.inf, 1e300, 1e-300]
)
def test_every_constructor_refuses_what_float32_cannot_hold(
    name, option, value
):
  make = one_model_federation if name in ('heterofl', 'splitmix') else (
      tiny_federation
  )
  federation = make(**NEEDED.get(name, {}))
  with pytest.raises(ValueError, match=rf'^{option} must be ') as error:
    ALGORITHMS[name](federation, **{option: value})
  assert '\n' not in str(error.value)


def test_bounds():
  options.between(0, 1, a=0, b=1.0)
  options.positive(a=1e-30, b=10)
  for call, message in (
      (lambda: options.positive(a=0.0), 'a must be above 0, got 0.'),
      (
          lambda: options.between(0, 1, below=True, a=1),
          'a must be at least 0 and below 1, got 1.',
      ),
      (
          lambda: options.not_negative(a='x'),
          "a must be a finite number, got 'x'.",
      ),
      (lambda: options.at_least(1, a=0), 'a must be at least 1, got 0.'),
      (
          lambda: options.at_least(1, a=2**31),
          'a must be at most 2147483647, got 2147483648.',
      ),
  ):
    with pytest.raises(ValueError) as error:
      call()
    assert str(error.value).startswith(message)


def test_temperatures_are_bounded():
  """T^2 is a factor of the loss: T = 1e30 would make it infinite."""
  federation = tiny_federation(**NEEDED['fedgkt'])
  for value in (1e30, 1e-30):
    with pytest.raises(ValueError, match=r'^temperature must be at least 0\.0'):
      ALGORITHMS['fedgkt'](federation, temperature=value)


def test_shares_of_endless_digits_are_refused():
  for share in ('1e999999999', '1e-999999999'):
    with pytest.raises(ValueError, match='rates must look like'):
      options.shares('rates', f'a:{share} b:1', 'ab')
