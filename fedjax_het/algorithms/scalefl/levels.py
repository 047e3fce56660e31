"""ScaleFL's levels: sub-models of one net, cut in width and in depth."""

from contextlib import AbstractContextManager
import math

from fedjax_het.aggregation.slicing import (
  Level,
  narrow,
  width_index,
  without_running_stats,
)
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import BlockModel
from fedjax_het.models.depth import numbered_blocks
from fedjax_het.models.exits import with_exits
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.options import share


def _share(group: Group, option: str):
  """A group's `rate` or `exit`, exact; 1 by default."""
  where = f'groups.{group.name}.{option}'
  return share(where, group.options.get(option, '1'))


def make_levels(
    federation: Federation,
) -> tuple[BlockModel, dict[str, Level]]:
  """The full net with its exits, and the sub-model of each group.

  Args:
    federation: Groups of one model, with the options `rate` and `exit`.

  Returns:
    The full net, whose norms keep no running statistics, and {group name:
    level}. `Level.index` has the blocks that the level runs; the trunk's end of
    its model is its last exit.

  Raises:
    ValueError: If an option is no share, groups hold different models, or a
      layer is left without a channel.
  """
  trunk = federation.groups[0].model
  depth = len(numbered_blocks(trunk))
  # The last exit is behind floor(exit * depth) blocks, at least one.
  cuts = {
      group.name: max(1, math.floor(_share(group, 'exit') * depth))
      for group in federation.groups
  }
  early = sorted({cut for cut in cuts.values() if cut < depth})
  full = without_running_stats(with_exits(trunk, early))
  heads = dict(zip((*early, depth), full.head_names, strict=True))
  levels = {}
  for group in federation.groups:
    rate, cut = _share(group, 'rate'), cuts[group.name]
    before = [heads[c] for c in early if c < cut]
    wide = full.chain(heads[cut], keep=before)
    # floor(s_l K) of the K channels of every layer.
    small = narrow(wide, lambda k, rate=rate: math.floor(rate * k))
    index = width_index(wide, small).params
    levels[group.name] = Level(float(rate), small, index)
  return full, levels


def scaler(level: Level) -> AbstractContextManager:
  """Divides the inputs of norms by s_l, but not those of shortcuts."""
  return scaled_norm_inputs(1 / level.rate, skip=('norm_shortcut',))
