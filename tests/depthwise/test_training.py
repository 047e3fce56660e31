"""Which stages are scanned, and that scanning equals the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.depthwise import make_stages, runs, share_out, train_stages
from fedjax_het.depthwise.stages import Cached
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.types import Visit
from fedjax_het.models import create
from fedjax_het.models.blocks import Variables
from fedjax_het.models.flops import product_flops
from tests.depthwise.nets import small_data, small_preresnet
from tests.tiny import tiny_local


def sgd(rate):
  return optax.chain(
      optax.add_decayed_weights(0.01), optax.sgd(rate, momentum=0.9)
  )


LOCAL = tiny_local(sgd, 0.05, 1, 4)


def ranges(model, spans, local=LOCAL, mode='per_stage', **options):
  stages = make_stages(model, spans, **options)
  return runs(stages, share_out(local, len(stages), mode))


def singles(first, stop):
  return [(u, u + 1) for u in range(first, stop)]


def test_runs_of_the_papers_schedule():
  """1/6 of PreResNet-20, 1 2 3 4 56 789: 2 and 3 are alike."""
  model = create('preresnet20', (32, 32, 3), 10)
  spans = [*singles(0, 4), (4, 6), (6, 9)]
  want = ((0, 1), (1, 3), (3, 4), (4, 5), (5, 6))
  assert ranges(model, spans) == want
  # m-FeDepth's heads differ by name.
  assert ranges(model, spans, heads='own') == tuple(singles(0, 6))


def test_runs_of_a_transformer():
  """Pairs of twelve encoder blocks, the first with the embeddings."""
  model = create('vit_t16', (32, 32, 3), 10, patch=8)
  spans = [(u, u + 2) for u in range(0, 12, 2)]
  assert ranges(model, spans) == ((0, 1), (1, 6))
  # Eight epochs over six stages: the first two have one more than the others.
  local = dataclasses.replace(LOCAL, epochs=8)
  assert ranges(model, spans, local, 'split') == ((0, 1), (1, 2), (2, 6))
  # Pairs and single blocks differ, and so do stages that skip a block.
  assert ranges(model, [(1, 2), (2, 3), (3, 5)]) == ((0, 2), (2, 3))
  assert ranges(model, [(1, 2), (3, 4)]) == ((0, 1), (1, 2))


def test_every_stage_has_batches_of_its_own(monkeypatch):
  """The first has the visit's key; no other has one of the keys split off.

  The inputs that two of the stages compute once have keys of their own.
  """
  model, keys, orders, of_inputs = small_preresnet(), [], [], []

  def fit(loss_fn, local, start, data, visit):
    keys.append(visit.key)
    order_key, _ = jax.random.split(visit.key)
    orders.append(shuffled_positions(order_key, data))
    return start, None, {}, 1

  def stage_inputs(stage, variables, data, key, batch_size, before):
    of_inputs.append(key)
    return Cached(None, None)

  training = 'fedjax_het.depthwise.training'
  monkeypatch.setattr(f'{training}.fit', fit)
  monkeypatch.setattr(f'{training}.stage_inputs', stage_inputs)
  stages = make_stages(model, singles(0, 3))
  visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(4))
  start = Variables(*model.abstract_variables)
  train_stages(
      stages, [LOCAL] * 3, start, small_data().client(1), visit,
      cache_prefix=True,
  )  # fmt: skip
  seen = [*keys, *jax.random.split(visit.key), *of_inputs]
  assert keys[0] == visit.key
  assert len({tuple(jax.random.key_data(key).tolist()) for key in seen}) == 7
  assert len({tuple(order.tolist()) for order in orders}) == 3


@pytest.mark.parametrize(
    ('make', 'spans'),
    [
        (lambda: small_preresnet((2, 2, 2, 4)), singles(0, 4)),
        # With running statistics, and nothing trained before the run.
        (lambda: small_preresnet((2, 2, 2), norm='batch'), singles(1, 3)),
        pytest.param(
            lambda: create('mini_vit4', (8, 8, 1), 3, patch=4),
            singles(0, 3),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_scanned_stages_are_the_loops(make, spans):
  model, data = make(), small_data().client(1)
  stages = make_stages(model, spans)
  shares = share_out(LOCAL, len(stages), 'per_stage')
  assert len(runs(stages, shares)) < len(stages)
  visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(4))
  start = model.init(jax.random.key(0))

  def trained(scan):
    return lambda start: train_stages(
        stages, shares, start, data, visit, scan=scan
    )

  # Row i of a run is counted with i frozen units before it.
  assert product_flops(trained(True), start) == product_flops(
      trained(False), start
  )
  got, want = (jax.jit(trained(scan))(start) for scan in (True, False))
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      got,
      want,
  )
  assert got[2] == 3 * len(stages)
  # Every unit has moved, each by a different amount.
  moved = [
      np.abs(jax.tree.leaves(got[0].params[name])[0]
             - jax.tree.leaves(start.params[name])[0]).max()
      for stage in stages
      for name in stage.model.span(stage.trained[-1], stage.trained[-1] + 1)
  ]  # fmt: skip
  assert min(moved) > 0 and len(set(moved)) == len(moved)
