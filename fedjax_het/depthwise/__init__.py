"""Depth-wise training and inference: stages, memory, schedules.

A model has three parts. Block 0 is the stem. The head begins at the first block
whose output is a vector (in dense nets, it is the last block alone). The blocks
in between are the units, which a schedule packs into stages.
"""

from fedjax_het.depthwise.inference import blockwise_logits
from fedjax_het.depthwise.measured import (
  StepMemory,
  measured_costs,
  step_memory,
)
from fedjax_het.depthwise.memory import (
  Costs,
  block_table,
  budget_mb,
  pack,
  paper_costs,
  paper_mb,
)
from fedjax_het.depthwise.schedules import (
  PLANS,
  Schedule,
  make_schedules,
  stage_figures,
)
from fedjax_het.depthwise.stages import (
  Stage,
  adapt,
  head_start,
  make_stages,
  own_heads,
  stage_inputs,
  stage_loss,
)
from fedjax_het.depthwise.training import runs, share_out, train_stages

__all__ = [
    'PLANS',
    'Costs',
    'Schedule',
    'Stage',
    'StepMemory',
    'adapt',
    'block_table',
    'blockwise_logits',
    'budget_mb',
    'head_start',
    'make_schedules',
    'make_stages',
    'measured_costs',
    'own_heads',
    'pack',
    'paper_costs',
    'paper_mb',
    'runs',
    'share_out',
    'stage_figures',
    'stage_inputs',
    'stage_loss',
    'step_memory',
    'train_stages',
]
