"""Blocks of clients for the levels of methods over widths."""

from fedjax_het.configs.widths import proportional
import pytest


def test_whole_blocks_of_clients_and_the_last_level_takes_the_rest():
  sizes = proportional(dict(a=4, b=2, c=2, d=1, e=1))
  assert sizes(10) == dict(a=4, b=2, c=2, d=1, e=1)
  assert sizes(25) == dict(a=8, b=4, c=4, d=2, e=7)
  assert proportional(dict(b=1, d=3))(100) == dict(b=25, d=75)


def test_too_few_clients_are_refused():
  with pytest.raises(ValueError) as error:
    proportional(dict(a=4, b=2))(5)
  assert str(error.value) == (
      'The levels a=4, b=2 need at least 6 clients, got 5.'
  )
