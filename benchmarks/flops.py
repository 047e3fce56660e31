"""Floating-point operations of training, counted from matrix products."""

from collections.abc import Sequence

from fedjax_het.depthwise import Stage
from fedjax_het.models import BlockModel
from fedjax_het.models.flops import forward_flops, product_flops

__all__ = [
    'cached_flops',
    'forward_flops',
    'product_flops',
    'stage_flops',
    'training_flops',
]


def training_flops(model: BlockModel) -> int:
  """Three forward passes: forward, and the gradients of both operands."""
  return 3 * forward_flops(model)


def stage_flops(stage: Stage) -> int:
  """Training of a stage; its frozen blocks have only a forward pass."""
  model = stage.model
  trained = (*stage.trained, *range(stage.head, len(model.blocks)))
  return forward_flops(model, stage.frozen) + 3 * forward_flops(model, trained)


def cached_flops(stages: Sequence[Stage]) -> int:
  """One epoch of all stages, with one forward pass per frozen block."""
  again = sum(forward_flops(s.model, s.frozen) for s in stages)
  once = forward_flops(stages[-1].model, stages[-1].frozen)
  return sum(map(stage_flops, stages)) - again + once
