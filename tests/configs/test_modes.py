"""HeteroFL's mode strings."""

from fractions import Fraction

from fedjax_het.configs.widths import parse_mode
import pytest


def test_the_mode_of_the_papers():
  mode = parse_mode('a4-b2-c2-d1-e1')
  assert mode.width == 1
  assert mode.fix(10) == dict(a=4, b=2, c=2, d=1, e=1)
  # A weight of 1 is N // 10 clients; the last level takes the rest.
  assert mode.fix(25) == dict(a=8, b=4, c=4, d=2, e=7)
  assert {k: str(rate) for k, rate in mode.rates.items()} == dict(
      a='1', b='1/2', c='1/4', d='1/8', e='1/16'
  )


def test_the_first_letter_is_the_global_width():
  mode = parse_mode('b1-d3')
  assert mode.width == Fraction(1, 2)
  assert mode.rates == dict(b=1, d=Fraction(1, 4))
  assert mode.fix(100) == dict(b=25, d=75)


@pytest.mark.parametrize('text', ['a4-b', 'f1', 'b1-a1', 'a1-a1', '', 'a0-b1'])
def test_unknown_modes_are_refused(text):
  with pytest.raises(ValueError) as error:
    parse_mode(text)
  assert str(error.value) == (
      f'Unknown mode {text!r}; it must list levels from a (1) to e (1/16) with '
      "their weights in this order, such as 'a4-b2-c2-d1-e1'."
  )


def test_too_few_clients_are_refused():
  with pytest.raises(ValueError, match="'a4-b2' needs at least 6 clients, got"):
    parse_mode('a4-b2').fix(5)
