"""Depth-wise training and inference: stages, memory, schedules.

Parts of a model: block 0 is the stem; from the first block whose output is a
vector on it is the head (in dense nets, the last block alone); those in
between are the units that a schedule packs into stages.
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
