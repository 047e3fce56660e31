"""ScaleFL's levels: sub-models of one net, cut in width and in depth."""

from contextlib import AbstractContextManager
import math

from fedjax_het.aggregation.early_exits import early_cuts, exit_models
from fedjax_het.aggregation.slicing import (
  Level,
  narrow,
  width_index,
)
from fedjax_het.engine.types import Federation
from fedjax_het.models.blocks import BlockModel
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.models.running_stats import without_running_stats
from fedjax_het.options import share


def make_levels(
    federation: Federation,
) -> tuple[BlockModel, dict[str, Level]]:
  """The full net with its exits, and the sub-model of each group.

  Args:
    federation: Groups with the options `rate` and `exit`, all of one model,
      which has the exits of `exits.exits`.

  Returns:
    The full net, whose norms keep no running statistics, and {group name:
    level}. `Level.index` has the blocks that the level runs; the trunk of a
    level's model ends at the level's last exit.

  Raises:
    ValueError: If an option is not a share, groups hold different models, or a
      layer is left without a channel.
  """
  cuts = early_cuts(federation.groups[0], federation)
  full, models = exit_models(federation, cuts)
  levels = {}
  for group in federation.groups:
    where = f'groups.{group.name}.rate'
    rate = share(where, group.options.get('rate', '1'))
    wide = without_running_stats(models[group.name])
    # floor(s_l K) of the K channels of every layer.
    small = narrow(wide, lambda k, rate=rate: math.floor(rate * k))
    index = width_index(wide, small).params
    levels[group.name] = Level(float(rate), small, index)
  return without_running_stats(full), levels


def scaler(level: Level) -> AbstractContextManager:
  """Divides the inputs of norms by s_l, except in shortcuts."""
  return scaled_norm_inputs(1 / level.rate, skip=('norm_shortcut',))
