"""The numbered blocks of a trunk."""

import pytest

from fedjax_het.models import BlockModel, create
from fedjax_het.models.depth import (
  head_blocks,
  numbered_blocks,
  stage_ends,
)
from fedjax_het.models.vit import vit
from tests.tiny import tiny_model


def test_the_depth_of_some_families():
  resnet = create('resnet14', (32, 32, 3), 10)
  assert numbered_blocks(resnet) == (
      'stage1_block0', 'stage2_block0', 'stage3_block0', 'stage3_block1',
      'stage4_block0', 'stage4_block1',
  )  # fmt: skip
  assert head_blocks(resnet) == ('pool', 'head')
  transformer = vit((8, 8, 1), 3, depth=2, variant='mini')
  assert numbered_blocks(transformer) == ('encoder00', 'encoder01')
  assert head_blocks(transformer) == ('token', 'head')
  assert len(numbered_blocks(create('resnet152', (32, 32, 3), 10))) == 50
  dense = create('mlp', (2, 2, 1), 3, depth=3)
  assert numbered_blocks(dense) == ('layer1', 'layer2')
  assert head_blocks(dense) == ('head',)


def test_the_ends_of_stages():
  def ends(model):
    return stage_ends(numbered_blocks(model))

  assert ends(create('resnet22', (32, 32, 3), 10)) == (2, 4, 7, 10)
  # Blocks whose names differ only in their number are one stage.
  assert ends(vit((8, 8, 1), 3, depth=2, variant='mini')) == (2,)
  assert ends(create('simple_cnn', (16, 16, 3), 10)) == (2, 4)


def test_a_trunk_without_numbers_is_refused():
  net = tiny_model(1)
  blocks = [block._replace(name=block.name.strip('0')) for block in net.blocks]
  odd = BlockModel('odd', tuple(blocks), net.input_shape, 3, net.cut)
  with pytest.raises(ValueError, match="Model 'odd' has no numbered block"):
    numbered_blocks(odd)
