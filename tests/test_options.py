"""Options of constructors: accepted values and error messages."""

import dataclasses
from fractions import Fraction
import functools
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import depthwise
from fedjax_het import options as opt
from fedjax_het.aggregation.averaging import model_training
from fedjax_het.aggregation.slicing import make_level
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.federated import crop_flip, cut_out
from fedjax_het.data.partition import PARTITIONS, partition
from fedjax_het.engine.clock import Device
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.rounds import make_rounds
from fedjax_het.models import MODELS, create
from fedjax_het.models.norm import BatchNorm, GroupNorm, LayerNorm
from fedjax_het.names import check_name
from tests.algorithms.suite import needed_federation
from tests.tiny import tiny_federation


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


def test_types_with_parameters():
  opt.check_type('sizes', (3, 4), tuple[int, ...])
  # A stored config is read with tuples.
  opt.check_type('sizes', (3, 4), list)
  opt.check_type('sizes', None, tuple[int, ...] | None)
  with pytest.raises(ValueError, match=r'must be tuple\[int, \.\.\.\], g'):
    opt.check_type('sizes', 3, tuple[int, ...])


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


def wrong(kind):
  """Values that an option of this type must refuse."""
  assert kind is not Any  # Every option has a type.
  kinds = typing.get_args(kind) or (kind,)
  yield from (math.nan, math.inf, -math.inf)
  if float in kinds:
    yield from (1e300, 1e-300)
  else:
    yield 1.5
  if bool not in kinds:
    yield True
  if str not in kinds:
    yield 'x'


def wrong_options(fn):
  """(option, wrong value) pairs for all options of a constructor."""
  for option, (kind, _) in opt.keyword_options(fn).items():
    for value in wrong(kind):
      yield option, value


def wrong_fields(cls):
  """(field, wrong value) pairs for the numbers and bools of a dataclass."""
  for field, kind in typing.get_type_hints(cls).items():
    kinds = typing.get_args(kind) or (kind,)
    if all(k in (bool, int, float, type(None)) for k in kinds):
      for value in wrong(kind):
        yield field, value


def refused(option, call):
  """Asserts that a call raises one line that begins with the option."""
  with pytest.raises(ValueError, match=rf'^{option} must be ') as error:
    call()
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ALGORITHMS)
def test_every_algorithm_refuses_what_is_not_of_an_options_type(name):
  federation = needed_federation(name, norm=True)
  make = ALGORITHMS[name]
  for option, value in wrong_options(make):
    refused(option, lambda o=option, v=value: make(federation, **{o: v}))
  with pytest.raises(ValueError, match=rf"'{name}' has no option 'no_such'"):
    make(federation, no_such=1)


def test_every_model_refuses_what_is_not_of_an_options_type():
  for name, constructor in MODELS.items():
    make = functools.partial(create, name, (32, 32, 3))
    for option, value in wrong_options(constructor):
      refused(option, functools.partial(make, 10, **{option: value}))
    for value in wrong(int):
      refused('num_classes', functools.partial(make, value))
      shape = (32, 32, value)
      refused('input_shape of .*', functools.partial(create, name, shape, 10))


def test_every_partition_refuses_what_is_not_of_an_options_type():
  for name, constructor in PARTITIONS.items():
    seeded = functools.partial(constructor, seed=0)
    for option, value in wrong_options(seeded):
      refused(option, functools.partial(
          partition, np.arange(100) % 10, 5, name=name, seed=0,
          **{option: value},
      ))  # fmt: skip


def test_every_entry_of_a_run_refuses_what_is_not_of_its_type():
  """Entries of Device, LocalTraining and Federation."""
  for name, value in wrong_fields(Device):
    refused(f'{name} of a device', lambda n=name, v=value: Device(**{n: v}))
  federation = tiny_federation(sizes=np.full(6, 6))
  for what in (federation, federation.local):
    change = functools.partial(dataclasses.replace, what)
    found = [*wrong_fields(type(what))]
    assert found
    for name, value in found:
      refused(name, functools.partial(change, **{name: value}))
  for sizes in (math.nan, math.inf, 'x', True, [1] * 5, [1.5] * 6, [-1] * 6):
    refused('sizes', lambda s=sizes: dataclasses.replace(federation, sizes=s))
  for name, value in (('num_rounds', -1), ('num_public', -1)):
    refused(name, lambda n=name, v=value: dataclasses.replace(
        federation, **{n: v}
    ))  # fmt: skip
  for name in ('epochs', 'batch_size', 'steps'):
    refused(name, lambda n=name: dataclasses.replace(
        federation.local, **{n: -1}
    ))  # fmt: skip


def test_what_is_no_function_and_no_model_is_refused():
  federation = tiny_federation()
  a_number = (math.nan, math.inf, 0.1)
  rows = [(federation.local, 'learning_rate', v, 'a function of the round, '
           'such as lambda round_num: 0.1') for v in a_number]
  rows += [
      (federation.local, 'optimizer', None, 'a function of the learning rate, '
       'such as optax.adam'),
      (federation.local, 'task', None, 'a Task'),
      (federation, 'local', math.nan, 'a LocalTraining'),
      (federation, 'server_model', math.nan, 'a BlockModel or None'),
      (federation, 'groups', math.nan, 'a tuple or a list'),
      (federation, 'groups', (math.nan,), 'a Group'),
      (federation.groups[0], 'model', None, 'a BlockModel'),
      (federation.groups[0], 'partner', math.nan, 'a BlockModel or None'),
      (federation.groups[0], 'client_ids', math.nan, 'a row of integers'),
      (federation.groups[0], 'client_ids', [math.nan], 'integers of at least'),
      (federation.groups[0], 'client_ids', [0.0], 'integers of at least 0, '),
      (federation.groups[0], 'client_ids', [-1], 'integers of at least 0, '),
  ]
  for whole, name, value, words in rows:
    with pytest.raises(ValueError, match=rf'^{name} must be {words}.*got '):
      dataclasses.replace(whole, **{name: value})
  with pytest.raises(ValueError, match=r'^groups must hold at least'):
    dataclasses.replace(federation, groups=())


NOT_COUNTS = (math.nan, math.inf, 0.5, -1)
NOT_AMOUNTS = (math.nan, math.inf, -1.0)


def calls_with_a_number():
  """(name, a function of the number, numbers that it must refuse)."""
  model, image = create('mlp', (4,), 2), jnp.zeros((1, 2, 2, 1))
  above_0, logits = (*NOT_AMOUNTS, 0), jnp.zeros((1, 2))
  key = jax.random.key(0)
  return [
      ('capacity', lambda v: make_rounds(None, v), (*NOT_COUNTS, 0)),
      ('budget', lambda v: depthwise.pack([1, 2], v), above_0),
      ('slack', lambda v: depthwise.pack([1, 2], 3, v), NOT_AMOUNTS),
      ('costs', lambda v: depthwise.pack([v, 2], 3), NOT_AMOUNTS),
      ('batch_size', lambda v: depthwise.paper_costs(model, v), NOT_COUNTS),
      ('full', lambda v: depthwise.budget_mb('1/2', v), above_0),
      ('budget', lambda v: depthwise.Schedule((), (), v), above_0),
      ('num_models', lambda v: depthwise.Schedule((), (), 1, v), NOT_COUNTS),
      ('num_classes', lambda v: dataclasses.replace(model, num_classes=v),
       (*NOT_COUNTS, 0)),
      ('momentum', lambda v: BatchNorm(momentum=v), (*NOT_AMOUNTS, 1.5)),
      ('epsilon', lambda v: BatchNorm(epsilon=v), NOT_AMOUNTS),
      ('groups', lambda v: GroupNorm(groups=v), (*NOT_COUNTS, 0)),
      ('epsilon', lambda v: GroupNorm(epsilon=v), NOT_AMOUNTS),
      ('eps', lambda v: LayerNorm(eps=v), NOT_AMOUNTS),
      ('mu', lambda v: model_training(tiny_federation().local, v), NOT_AMOUNTS),
      ('temperature', lambda v: distillation(logits, logits, v), above_0),
      ('side', lambda v: cut_out(key, image, side=v), NOT_COUNTS),
      ('pad', lambda v: crop_flip(key, image, pad=v), NOT_COUNTS),
  ]  # fmt: skip


def test_numbers_out_of_their_range_are_refused_when_they_are_given():
  for name, call, wrong in calls_with_a_number():
    for value in wrong:
      refused(name, functools.partial(call, value))


def test_a_width_is_a_share():
  model = create('mlp', (4,), 2)
  for rate in (math.nan, math.inf, -math.inf, 0, 1.5, 'x', True):
    refused('rate', lambda r=rate: make_level(model, r))


def test_unknown_names():
  for name, message in (
      ('ratt', "Unknown kind 'ratt'; did you mean 'rate'? Known are rate, 3."),
      ('', "Unknown kind ''; known are rate, 3."),
      (4, 'Unknown kind 4; known are rate, 3.'),
  ):
    with pytest.raises(ValueError) as error:
      check_name('kind', name, ('rate', 3))
    assert str(error.value) == message
  opt.one_of('kind', 3, ('rate', 3))
  with pytest.raises(ValueError, match=r"^Unknown kind 'x'; there are none\.$"):
    opt.one_of('kind', 'x', ())


def test_bounds():
  opt.between(0, 1, a=0, b=1.0)
  opt.positive(a=1e-30, b=10)
  for call, message in (
      (lambda: opt.positive(a=0.0), 'a must be above 0, got 0.'),
      (
          lambda: opt.between(0, 1, below=True, a=1),
          'a must be at least 0 and below 1, got 1.',
      ),
      (
          lambda: opt.not_negative(a='x'),
          "a must be a finite number, got 'x'.",
      ),
      (lambda: opt.at_least(1, a=0), 'a must be at least 1, got 0.'),
      (lambda: opt.at_least(1, a=math.nan), 'a must be an integer, got nan.'),
      (
          lambda: opt.at_least(1, a=2**31),
          'a must be at most 2147483647, got 2147483648.',
      ),
  ):
    with pytest.raises(ValueError) as error:
      call()
    assert str(error.value).startswith(message)


def test_temperatures_are_bounded():
  """T^2 is a factor of the loss: T = 1e30 would make it infinite."""
  federation = tiny_federation(sizes=np.full(6, 6))
  for value in (1e30, 1e-30):
    with pytest.raises(ValueError, match=r'^temperature must be at least 0\.0'):
      ALGORITHMS['fedgkt'](federation, temperature=value)


def test_a_share_is_exact():
  for value, want in (
      ('1/3', Fraction(1, 3)), (1 / 3, Fraction(1, 3)), (0.1, Fraction(1, 10)),
      ('0.25', Fraction(1, 4)), (1, Fraction(1)), (np.float32(0.5), 0.5),
      (Fraction(2, 7), Fraction(2, 7)), (' 1/2 ', Fraction(1, 2)),
  ):  # fmt: skip
    assert opt.share('rate', value) == want


@pytest.mark.parametrize(
    'value',
    ['', 'x', '1/0', '1:2', None, True, (1, 2), math.nan, math.inf,
     '1e999999999', '1e-999999999', '9' * 5000],
)  # fmt: skip
def test_what_is_no_share_is_refused_in_one_line(value):
  with pytest.raises(ValueError, match=r'^rate must be a share such') as error:
    opt.share('rate', value)
  assert '\n' not in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize('value', [0, '0', -1, '3/2', 1.5, 1e-9, '1.0001'])
def test_shares_lie_above_0_and_at_most_at_1(value):
  with pytest.raises(ValueError, match='above 0 and at most 1, got'):
    opt.share('rate', value)


def test_shares_of_groups():
  given = dict(b=dict(rate='1/3'), a=dict(rate=1, budget='1/9'))
  assert opt.group_shares('rate', given) == dict(a=1, b=Fraction(1, 3))
  nothing = dict(c={}, a=dict(rate=''), b=dict(rate=None))
  found = opt.group_shares('rate', nothing)
  assert found == dict(a=1, b=Fraction(1, 2), c=Fraction(1, 4))
  assert [*found] == ['c', 'a', 'b']  # The groups' own order.
  with pytest.raises(ValueError, match=r'^groups\.b\.budget is missing; give'):
    opt.group_shares('budget', given)
