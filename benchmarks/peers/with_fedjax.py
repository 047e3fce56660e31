"""fedjax: a program of `rows.programs`, run in fedjax's environment."""

import fedjax
from fedjax.algorithms import fed_avg
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers import meter


def crop_flip(key, x, pad: int = 4):
  """Random crop after zero padding, and horizontal flip, [B, H, W, C]."""
  crop_key, flip_key = jax.random.split(key)
  padded = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  offset = jax.random.randint(crop_key, (len(x), 2), 0, 2 * pad + 1)
  x = jax.vmap(
      lambda image, o: jax.lax.dynamic_slice(image, (*o, 0), x.shape[1:])
  )(padded, offset)
  flipped = jax.random.bernoulli(flip_key, 0.5, (len(x), 1, 1, 1))
  return jnp.where(flipped, x[:, :, ::-1], x)


def _layer(x, kind: str, *numbers):
  if kind == 'conv':
    return jax.nn.relu(hk.Conv2D(*numbers, padding='VALID')(x))
  if kind == 'pool':
    return hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')
  if kind == 'dropout':
    return hk.dropout(hk.next_rng_key(), *numbers, x)
  x = hk.Linear(*numbers)(hk.Flatten()(x))
  return jax.nn.relu(x) if kind == 'dense' else x


def model_of(task) -> fedjax.Model:
  """The task's network."""

  def forward(batch):
    x = batch['x']
    if task.local['augment'] == 'crop_flip':
      x = crop_flip(hk.next_rng_key(), x)
    for layer in task.layers[0]:
      x = _layer(x, *layer)
    return x

  sample = {
      'x': np.zeros((1, *task.input_shape), np.float32),
      'y': np.zeros(1, np.int32),
  }
  return fedjax.create_model_from_haiku(
      hk.transform(forward),
      sample,
      lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
          batch['y'], logits
      ),
  )


class Count:
  """Counts the images of all batches."""

  def __init__(self):
    self.images = 0

  def __call__(self, batch):
    self.images += len(batch['y'])
    return batch


def main() -> None:
  task = meter.this_task()
  local, count = task.local, Count()
  data = fedjax.InMemoryFederatedData(
      {
          b'%06d' % k: dict(x=meter.normalised(task, images), y=labels)
          for k, (images, labels) in enumerate(
              meter.examples(task.data, task.parts)
          )
      },
      preprocess_batch=fedjax.BatchPreprocessor([count]),
  )
  count.images = 0  # Construction may read the data.
  model = model_of(task)
  tx = optax.sgd(local['learning_rate'], local['momentum'] or None)
  if local['weight_decay']:
    tx = optax.chain(optax.add_decayed_weights(local['weight_decay']), tx)
  algorithm = fed_avg.federated_averaging(
      fedjax.model_grad(model),
      fedjax.optimizers.create_optimizer_from_optax(tx),
      fedjax.optimizers.sgd(1.0),
      fedjax.ShuffleRepeatBatchHParams(
          batch_size=local['batch_size'], num_epochs=local['epochs']
      ),
  )
  sampler = fedjax.client_samplers.UniformGetClientSampler(
      data, num_clients=task.cohort, seed=0
  )
  state = algorithm.init(model.init(jax.random.PRNGKey(0)))
  numbers = sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params))
  clock, enough = meter.Meter(task, numbers), False
  while not enough:
    count.images = 0
    state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    enough = clock.round(count.images)


if __name__ == '__main__':
  main()
