"""Requirements of an algorithm, declared with its constructor.

The check of a config, the builder and the shared test suite read them, so a new
method does not edit any of these:

    @requires(public='unlabelled', group_options=dict(budget='1'))
    def my_method(federation, *, ...):

A call of the constructor checks the federation against the requirements, and
the options against their types.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import difflib
import functools
from typing import Any

from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import Head
from fedjax_het.options import check_call, check_options, keyword_options
from fedjax_het.renamed import check_renamed


@dataclasses.dataclass(frozen=True)
class Needs:
  """Requirements of an algorithm on the federation.

  Attributes:
    public: 'labelled' for a public set whose labels the method may read,
      'unlabelled' for one whose labels it may not read; None for no public set.
      `experiment.build` hides the labels of an 'unlabelled' one, by
      `federate(public_labels=False)`.
    sizes: Whether `Federation.sizes` must be known.
    one_model: Whether all groups must have the same architecture.
    server_model: Whether `Federation.server_model` must be given; None if it is
      optional.
    partner: Whether each `Group.partner` must be given; None if it is optional.
    keep_optimizer: The method's default for `LocalTraining.keep_optimizer`;
      None if it always resets optimizer states.
    heads: `(group, federation) -> heads`, the additional heads
      (`models.blocks.Head`) that a group's model must have; None for none. The
      builder attaches them, see `with_heads`. They do not depend on the
      method's options. A method attaches heads that do so itself, as `fedepth`
      for `heads='own'`; the memory check of a run counts these in the server's
      state only.
    group_options: {option: default} of `Group.options`. A value must be of its
      default's type; with the default None the constructor checks it.
    local_stats: Whether running statistics of norms can stay on the clients. If
      not, `Federation.local_stats` is refused for models that have them.
    task: Name of the only supported task; None for any.
    num_rounds: Whether what a round computes depends on
      `Federation.num_rounds`. A run of such a method resumes with the same
      number of rounds only.
  """

  public: str | None = None
  sizes: bool = False
  one_model: bool = False
  server_model: bool | None = False
  partner: bool | None = False
  keep_optimizer: bool | None = None
  heads: Callable[[Group, Federation], tuple[Head, ...]] | None = None
  group_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  local_stats: bool = True
  task: str | None = None
  num_rounds: bool = False

  def __post_init__(self):
    if self.public not in (None, 'labelled', 'unlabelled'):
      raise ValueError(
          "public must be 'labelled', 'unlabelled' or None, got "
          f'{self.public!r}.'
      )

  def known_group_options(self) -> dict[str, tuple[Any, Any]]:
    """{option: (type, default)}, for `fedjax_het.options.check_options`."""
    return {
        name: (Any if default is None else type(default), default)
        for name, default in self.group_options.items()
    }


NOTHING = Needs()


def requires(**needs) -> Callable[[Callable], Callable]:
  """A decorator that declares the `Needs` of an algorithm's constructor."""
  declared = Needs(**needs)

  def declare(constructor):
    @functools.wraps(constructor)
    def checked(federation, **options):
      name = constructor.__name__
      check_renamed(options, keyword_options(constructor), method=name)
      check_needs(checked, federation)
      check_call(f'Algorithm {name!r}', constructor, options)
      return constructor(federation, **options)

    checked.needs = declared
    return checked

  return declare


def check_needs(constructor: Callable, federation: Federation) -> None:
  """Checks a federation against an algorithm's `Needs`.

  `requires` calls it, so that a config and a call of the constructor get the
  same check. Algorithms check shapes themselves.

  Args:
    constructor: The algorithm's constructor.
    federation: The federation.

  Raises:
    ValueError: If the task is not supported, a part of the federation is
      missing, running statistics cannot stay on the clients, a group's option
      is misspelt or of the wrong type, groups hold different models where one
      is required, or a model lacks a head or has it behind another block.
  """
  name, needs = constructor.__name__, needs_of(constructor)
  check_task(name, needs.task, federation)
  if needs.public is not None and not federation.num_public:
    raise ValueError(
        f'{name} needs a public set, Federation(num_public=...).'
    )
  if needs.sizes and federation.sizes is None:
    raise ValueError(f'{name} needs Federation(sizes=...).')
  if needs.server_model and federation.server_model is None:
    raise ValueError(f'{name} needs Federation(server_model=...).')
  known = needs.known_group_options()
  for group in federation.groups:
    if needs.partner and group.partner is None:
      raise ValueError(
          f'{name} needs Group(partner=...), which {group.name!r} lacks.'
      )
    # Options of other methods, with which this one is compared, are ignored.
    meant = {
        option: value
        for option, value in group.options.items()
        if option in known or difflib.get_close_matches(option, known)
    }
    check_options(f'groups.{group.name}', meant, known, name)
  if (
      federation.local_stats
      and not needs.local_stats
      and any(g.model.abstract_variables.stats for g in federation.groups)
  ):
    raise ValueError(
        f'{name} does not keep running statistics on the clients; set '
        'local_stats=False.'
    )
  if needs.one_model:
    models = {g.name: (g.model.name, g.model) for g in federation.groups}
    check_one_model(name, models, needs.group_options)
  for group in federation.groups:
    lacks = [head.name for head in missing_heads(needs, group, federation)]
    if lacks:
      raise ValueError(
          f'groups.{group.name}: {name} needs the heads {", ".join(lacks)}, '
          f'which {group.model.name!r} lacks; attach them by '
          f'engine.needs.with_heads({name}, federation).'
      )


def missing_heads(
    needs: Needs, group: Group, federation: Federation
) -> tuple[Head, ...]:
  """The heads that a method needs and a group's model lacks, by name.

  Args:
    needs: The method's needs.
    group: The group.
    federation: Its federation.

  Returns:
    The heads.

  Raises:
    ValueError: If the model has a head of the same name behind another block.
  """
  if needs.heads is None:
    return ()
  model, missing = group.model, []
  places = {head.name: head.after for head in model.heads}
  for head in needs.heads(group, federation):
    if head.name not in model.head_names:
      missing.append(head)
    elif places.get(head.name, head.after) != head.after:
      raise ValueError(
          f'groups.{group.name}: the head {head.name} of {model.name!r} is '
          f'behind {places[head.name]!r}, but is needed behind '
          f'{head.after!r}; begin with a model without it.'
      )
  return tuple(missing)


def with_heads(constructor: Callable, federation: Federation) -> Federation:
  """Attaches the heads that an algorithm needs to the groups' models.

  Args:
    constructor: The algorithm's constructor.
    federation: The federation, with the options of its groups.

  Returns:
    The federation. A head that a model already has, by name, is kept.

  Raises:
    ValueError: If a model cannot have such heads, has one behind another
      block, or a group's option that places them is wrong.
  """
  needs = needs_of(constructor)
  if needs.heads is None:
    return federation
  groups = tuple(
      dataclasses.replace(
          group,
          model=group.model.with_heads(
              *missing_heads(needs, group, federation)
          ),
      )
      for group in federation.groups
  )
  return dataclasses.replace(federation, groups=groups)


def check_task(name: str, task: str | None, federation: Federation) -> None:
  """Raises ValueError if the federation's task is not supported.

  Args:
    name: The algorithm's name, for the message.
    task: Name of the only supported task; None for any.
    federation: The federation.

  Raises:
    ValueError: If its task is a different one.
  """
  if task not in (None, federation.task.name):
    raise ValueError(
        f'{name} is made for the task {task!r}, not for '
        f'{federation.task.name!r}.'
    )


def check_one_model(
    name: str,
    models: Mapping[str, tuple[str, Any]],
    group_options: Iterable[str] = (),
) -> None:
  """Raises ValueError if groups hold different models.

  Args:
    name: The algorithm's name, for the message.
    models: {group name: (the model's name, the value that must be equal)}, the
      value a mapping if the message should name the entries that differ.
    group_options: In what groups of the algorithm may differ, for the message.

  Raises:
    ValueError: If they differ.
  """
  (first, one), *others = models.items()
  for group, other in others:
    if other != one:
      names = ' and '.join(group_options)
      raise ValueError(
          f'groups.{group}: {name} needs one model for all groups, but those '
          f'of {first!r} ({one[0]}) and {group!r} ({other[0]}) differ'
          f'{_entries(one, other)}; give both one model and the same options'
          + (f', and each group its own {names}.' if names else '.')
      )


def _entries(one: tuple[str, Any], other: tuple[str, Any]) -> str:
  """In which options two models of one name differ; '' if not known."""
  a, b = one[1], other[1]
  if one[0] != other[0] or not isinstance(a, Mapping):
    return ''
  pairs = [
      f'{key} ({a.get(key)!r} and {b.get(key)!r})'
      for key in sorted({*a, *b})
      if a.get(key) != b.get(key)
  ]
  return f' in {", ".join(pairs)}'


def needs_of(constructor: Callable) -> Needs:
  """The declared needs of a constructor; an empty `Needs` by default."""
  return getattr(constructor, 'needs', NOTHING)
