"""Builds methods and their federations for the shared suite.

A method is run with its defaults on the smallest federation that it needs. A
method's own test file `test_NAME.py` may say otherwise, in a list `SUITE` of
`Case`s: the suite runs the first, and pads the clients of all. `CLOCKS` says
there how `test_clocks.py` runs the method.
"""

from collections.abc import Callable
import dataclasses
import importlib
import importlib.util
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.needs import needs_of, with_heads
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from tests.tiny import (
    SIZES,
    one_model_federation,
    tiny_federation,
    tiny_model,
)

NUM_PUBLIC = 11


class Case(NamedTuple):
  """Options that a method is tested with.

  Attributes:
    options: Arguments of the constructor.
    groups: {group: options of that group}; the groups are tiny1 and tiny2.
  """

  options: dict[str, Any] = {}
  groups: dict[str, dict[str, Any]] = {}


class Clocks(NamedTuple):
  """How a method is run in `test_clocks.py`.

  Attributes:
    options: Of the constructor, with which equal models that do not learn
      agree.
    loss: The metric that is a distance between what clients know and are sent;
      None for none.
    part: The part of an evaluated model that is trained, which must not change.
  """

  options: dict[str, Any] = {}
  loss: str | None = None
  part: Callable[[Any], Any] = lambda model: model


def told(name: str, what: str, default):
  """What a method's own test file says under a name, if it does."""
  module = f'tests.algorithms.test_{name}'
  if importlib.util.find_spec(module) is None:
    return default
  return getattr(importlib.import_module(module), what, default)


def cases(name: str) -> list[Case]:
  """The cases of a method's own test file; else its defaults alone."""
  return told(name, 'SUITE', [Case()])


def clocks(name: str) -> Clocks:
  """The `CLOCKS` of a method's own test file; else its defaults."""
  return told(name, 'CLOCKS', Clocks())


def needed_federation(
    name: str, norm: bool = False, per_group: int = 3, **fields
) -> Federation:
  """A federation of two groups, with all that a method needs.

  Args:
    name: A key of `ALGORITHMS`.
    norm: Whether the nets have norm layers.
    per_group: Clients per group; 3 fits `tiny_data()`.
    **fields: Other fields of `Federation`.

  Returns:
    The federation, with the fields that the method's `Needs` asks for.
  """
  needs = needs_of(ALGORITHMS[name])
  if needs.num_rounds:
    fields.setdefault('num_rounds', 4)
  if needs.public is not None:
    fields['num_public'] = NUM_PUBLIC
  if needs.sizes:
    fields['sizes'] = np.resize(np.array(SIZES), 2 * per_group)
  if needs.server_model:
    fields['server_model'] = tiny_model(3, norm=norm)
  if needs.one_model:
    # A side exit is behind the first of two numbered blocks.
    depth = 2 if needs.heads is None else 3
    federation = one_model_federation(norm, 2, per_group, depth, **fields)
  else:
    federation = tiny_federation((1, 2), per_group, norm=norm, **fields)
  if needs.partner:
    partner = tiny_model(1, norm=norm)
    federation = dataclasses.replace(
        federation,
        groups=tuple(
            dataclasses.replace(group, partner=partner)
            for group in federation.groups
        ),
    )
  return federation


def make(
    name: str, federation: Federation | None = None, case: Case | None = None
) -> tuple[FederatedAlgorithm, Federation]:
  """The method of a case (by default its first), and the federation."""
  federation = federation or needed_federation(name)
  case = cases(name)[0] if case is None else case
  defaults = needs_of(ALGORITHMS[name]).group_options
  federation = dataclasses.replace(
      federation,
      groups=tuple(
          dataclasses.replace(
              group, options={**defaults, **case.groups.get(group.name, {})}
          )
          for group in federation.groups
      ),
  )
  federation = with_heads(ALGORITHMS[name], federation)
  return ALGORITHMS[name](federation, **case.options), federation
