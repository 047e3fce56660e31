"""FedGen's generator: the net, and its random inputs."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.engine.types import Federation
from fedjax_het.models.blocks import Variables
from fedjax_het.models.layers import Linear
from fedjax_het.models.norm import BatchNorm


class Generator(nn.Module):
  """G: noise and a label -> the input of a classifier.

  Attributes:
    features: Size of the output, d.
    num_classes: C.
    noise_size: m.
    hidden: Units of the hidden layer, h.
  """

  features: int
  num_classes: int
  noise_size: int
  hidden: int

  @nn.compact
  def __call__(self, noise, labels, train=False):
    """[B, m] noise and [B] int32 labels -> [B, d], without a final ReLU."""
    x = jnp.concatenate(
        [noise, jax.nn.one_hot(labels, self.num_classes)], axis=1
    )
    x = Linear(self.hidden, name='hidden')(x)
    x = jax.nn.relu(BatchNorm(name='norm')(x, train))
    return Linear(self.features, name='output')(x)


def init_generator(net: Generator, key) -> Variables:
  """Draws a generator's variables."""
  noise, labels = jnp.zeros((1, net.noise_size)), jnp.zeros(1, jnp.int32)
  drawn = net.init(key, noise, labels)
  return Variables(drawn['params'], drawn['batch_stats'])


def generate(
    net: Generator, variables: Variables, noise, labels, train: bool = False
) -> tuple[jax.Array, Any]:
  """Features z = G(noise, labels), and the generator's running statistics.

  Args:
    net: G.
    variables: Its variables.
    noise: [B, m].
    labels: [B] int32.
    train: Whether the norm uses the batch's statistics and updates the running
      ones.

  Returns:
    z [B, d] and the statistics, unchanged if not `train`.
  """
  tree = {'params': variables.params, 'batch_stats': variables.stats}
  if not train:
    return net.apply(tree, noise, labels), variables.stats
  z, new = net.apply(tree, noise, labels, True, mutable=['batch_stats'])
  return z, new['batch_stats']


def draw_noise(key, num: int, size: int) -> jax.Array:
  """[num, size] noise, uniform on [0, 1) as in the authors' code."""
  return jax.random.uniform(key, (num, size))


def draw_labels(key, allowed, num: int) -> jax.Array:
  """[num] int32 labels, uniform over those that are allowed ([C] bool)."""
  logits = jnp.where(allowed, 0.0, -jnp.inf)
  return jax.random.categorical(key, logits, shape=(num,)).astype(jnp.int32)


def latent_size(federation: Federation) -> int:
  """Size of the classifiers' input, d.

  Args:
    federation: The federation.

  Returns:
    The size.

  Raises:
    ValueError: If the inputs of classifiers differ or are not vectors, or a
      classifier has running statistics.
  """
  shapes = {g.name: g.model.shapes[g.model.cut[1] - 1]
            for g in federation.groups}  # fmt: skip
  if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
    listed = ', '.join(
        f'{name} {"x".join(map(str, shape))}' for name, shape in shapes.items()
    )
    raise ValueError(
        'fedgen needs classifiers whose inputs are vectors of one size, got '
        f'{listed}; choose models that agree.'
    )
  for group in federation.groups:
    for name in group.model.classifier:
      if name in group.model.abstract_variables.stats:
        raise ValueError(
            f'fedgen: the classifier of group {group.name!r} has running '
            f'statistics in block {name!r}; choose a norm without them.'
        )
  return next(iter(shapes.values()))[0]
