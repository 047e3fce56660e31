"""What a paper prints for one cell of a table."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
  """One printed accuracy.

  Attributes:
    source: Paper and table.
    method: As printed.
    setting: The paper's setting in words.
    accuracy: In percent.
    spread: Standard deviation over seeds; None if none is printed.
    reached: First round that reaches `level`; None if none is printed.
    level: Accuracy in percent to which `reached` refers.
    printed: The paper's words, if they say more than `accuracy`.
  """

  source: str
  method: str
  setting: str
  accuracy: float
  spread: float | None = None
  reached: int | None = None
  level: float | None = None
  printed: str = ''

  @property
  def text(self) -> str:
    """The number as the paper prints it, with its deviation."""
    shown = self.printed or str(self.accuracy)
    return shown if self.spread is None else f'{shown} ± {self.spread}'

  @property
  def first_round(self) -> str:
    """The round that reached `level`, in words; '-' if none is printed."""
    if self.reached is None:
      return '-'
    return f'{self.reached} (at {self.level:g} %)'


def models(config: Mapping[str, Any]) -> set[str]:
  """The names of the models of a config's groups."""
  return {
      group.get('model', name) if isinstance(group, Mapping) else name
      for name, group in config['groups'].items()
  }
