"""The benchmarks compare equal work, and measure what they claim."""

import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from benchmarks import common, fedin_epoch, memory, naive_fedin
from fedjax_het.models.resnet import NUM_BLOCKS, resnet


def _count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize('depth', fedin_epoch.DEPTHS)
def test_the_nets_have_equally_many_parameters(depth):
  shape = (32, 32, 3)
  want = _count(resnet(shape, 10, depth=depth).abstract_variables.params)
  init, _ = naive_fedin.make_epoch(
      NUM_BLOCKS[depth], shape, lr=1e-3, mu=0.1, lam=1.0
  )
  params, _ = jax.eval_shape(init, jax.random.key(0))
  assert _count(params) == want
  pytest.importorskip('torch', reason='PyTorch is an optional extra')
  from benchmarks import torch_fedin

  net = torch_fedin.ResNet(NUM_BLOCKS[depth], 3, 10)
  assert sum(p.numel() for p in net.parameters()) == want


def test_interleave_takes_turns_and_the_least_time():
  calls, pauses = [], iter([0.2, 0.0])

  def slow_at_first():
    calls.append('a')
    time.sleep(next(pauses))

  seconds = common.interleave(
      {'a': (slow_at_first, 2), 'b': (lambda: calls.append('b'), 1)}
  )
  assert calls == ['a', 'b', 'a']
  assert seconds['a'] < 0.2


def test_federation_holds_what_was_asked_for():
  model = resnet((8, 8, 1), 10, depth=10, width=0.05)
  federation, data = common.make_federation(model, 3, 20)
  assert federation.num_clients == data.num_clients == 3
  np.testing.assert_array_equal(data.sizes, [20, 20, 20])


def test_markdown_and_peak():
  table = common.markdown(['name', 'number'], [['a', 1234.4], ['b', 1]])
  assert table.splitlines()[2:] == ['| a | 1234 |', '| b | 1 |']
  before = memory.peak_bytes()
  assert before > 10 * memory.MEGABYTE
  assert np.ones(32 << 20, np.uint8).sum() == 32 << 20
  assert memory.peak_bytes() >= before


@pytest.mark.skipif(
    not pathlib.Path('/proc/self/status').is_file(),
    reason='ru_maxrss alone begins with the peak of the parent',
)
def test_the_peak_is_not_that_of_the_parent():
  ballast = np.ones(640 * memory.MEGABYTE, np.uint8)
  code = 'from benchmarks import memory; print(memory.peak_bytes())'
  child = subprocess.check_output([sys.executable, '-c', code], text=True)
  assert 10 * memory.MEGABYTE < int(child) < ballast.nbytes
  assert memory.peak_bytes() > ballast.nbytes
