"""Floating-point operations of training, as the benchmarks count them."""

from fedjax_het.depthwise import Stage
from fedjax_het.models import BlockModel
from fedjax_het.models.flops import forward_flops, product_flops

__all__ = ['forward_flops', 'product_flops', 'stage_flops', 'training_flops']


def training_flops(model: BlockModel) -> int:
  """Three times the forward pass: forward, and a gradient by each operand."""
  return 3 * forward_flops(model)


def stage_flops(stage: Stage) -> int:
  """Training a stage: its frozen blocks have a forward pass only."""
  model = stage.model
  trained = (*stage.trained, *range(stage.head, len(model.blocks)))
  return forward_flops(model, stage.frozen) + 3 * forward_flops(model, trained)
