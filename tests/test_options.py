"""Options of constructors: what is accepted, and what is said if not."""

import functools

import pytest

from fedjax_het import options as opt


def constructor(
    first, *, rate: float = 0.1, steps: int = 3, clip: float | None = None,
    loud: bool = False, plain=2, nothing=None,
):  # fmt: skip
  del first, rate, steps, clip, loud, plain, nothing


KNOWN = opt.keyword_options(constructor)


def test_keyword_options_reads_types_and_defaults():
  assert KNOWN['rate'] == (float, 0.1)
  assert KNOWN['clip'] == (float | None, None)
  assert KNOWN['plain'] == (int, 2)
  assert list(KNOWN) == ['rate', 'steps', 'clip', 'loud', 'plain', 'nothing']


def test_what_a_partial_fixes_is_no_option():
  known = opt.keyword_options(functools.partial(constructor, steps=1))
  assert 'steps' not in known and 'rate' in known


@pytest.mark.parametrize(
    'given',
    [
        dict(rate=1),
        dict(clip=None),
        dict(clip=2.5, loud=True),
        dict(nothing='x', plain=0),
    ],
)
def test_accepts(given):
  opt.check_options('where', given, KNOWN, 'the thing')


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (dict(steps=True), 'where.steps must be an integer, got True.'),
        (dict(steps=1.0), 'where.steps must be an integer, got 1.0.'),
        (dict(loud=1), 'where.loud must be True or False, got 1.'),
        (dict(rate='1'), "where.rate must be a finite number, got '1'."),
        (
            dict(rate=float('inf')),
            'where.rate must be a finite number, got inf.',
        ),
        (
            dict(clip='no'),
            "where.clip must be a finite number or None, got 'no'.",
        ),
        (
            dict(rat=1.0),
            "where.rat: the thing has no option 'rat'; did you mean 'rate'? "
            'It takes rate, steps, clip, loud, plain, nothing.',
        ),
    ],
)
def test_refuses(given, message):
  with pytest.raises(ValueError) as error:
    opt.check_options('where', given, KNOWN, 'the thing')
  assert str(error.value) == message
