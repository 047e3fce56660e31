"""Passes with other settings, optimisers that begin anew, outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.data.federated import InMemory
from fedjax_het.engine.phases import inference_logits, passes, restarted
from tests.tiny import tiny_local, tiny_model


def test_passes_keep_the_optimiser_and_count_epochs():
  local = tiny_local(optax.adam, epochs=2, batch_size=4, steps=7)
  found = passes(local, 3, 5)
  assert (found.epochs, found.batch_size, found.steps) == (3, 5, None)
  assert found.optimizer is local.optimizer
  assert found.learning_rate is local.learning_rate
  assert passes(local, 1).batch_size == 4


def test_every_step_of_a_restarted_adam_has_the_size_of_the_learning_rate():
  local = passes(tiny_local(optax.adam), 1, fresh_optimizer=True)
  params = jnp.zeros(3)
  for tx in (restarted(optax.adam(0.01)), local.optimizer(0.01)):
    state = tx.init(params)
    for grads in ([1.0, -2.0, 0.1], [5.0, 3.0, -0.01]):
      updates, state = tx.update(jnp.array(grads), state, params)
      np.testing.assert_allclose(updates, -0.01 * np.sign(grads), rtol=1e-4)


def test_outputs_are_in_the_order_of_the_examples_and_of_inference():
  model = tiny_model(1)
  variables = model.init(jax.random.key(0))
  shift = jax.tree.map(lambda s: s + 0.5, variables.stats)
  variables = variables._replace(stats=shift)
  x = jax.random.normal(jax.random.key(1), (7, *model.input_shape))
  examples = InMemory(x, jnp.zeros(7, jnp.int32), jnp.int32(7))
  want, _ = model.apply(variables, x)
  np.testing.assert_allclose(
      inference_logits(model, variables, examples), want, rtol=1e-5, atol=1e-6
  )
