"""Naive FedIN local epoch in JAX and Flax: the baseline on a CPU.

It uses `vmap` over clients, `scan` over steps, and Flax's convolution and
pooling with JAX's gradients.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class BasicBlock(nn.Module):

  features: int
  stride: int

  @nn.compact
  def __call__(self, x):
    def unit(x, kernel, stride):
      pad = ((kernel // 2, kernel // 2),) * 2
      strides = (stride, stride)
      size = (kernel, kernel)
      x = nn.Conv(self.features, size, strides, pad, use_bias=False)(x)
      return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

    y = unit(nn.relu(unit(x, 3, self.stride)), 3, 1)
    if self.stride > 1 or x.shape[-1] != self.features:
      x = unit(x, 1, self.stride)
    return nn.relu(x + y)


class Extractor(nn.Module):

  features: int

  @nn.compact
  def __call__(self, x):
    pad = ((3, 3), (3, 3))
    x = nn.Conv(self.features, (7, 7), (2, 2), pad, use_bias=False)(x)
    x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
    return nn.max_pool(nn.relu(x), (3, 3), (2, 2), ((1, 1), (1, 1)))


class Middle(nn.Module):

  num_blocks: Sequence[int]
  features: Sequence[int]

  @nn.compact
  def __call__(self, x):
    for stage, number in enumerate(self.num_blocks):
      for b in range(number):
        x = BasicBlock(self.features[stage], 2 if stage and not b else 1)(x)
    return jnp.mean(x, axis=(1, 2))


def make_epoch(num_blocks, input_shape, *, lr, mu, lam, width=1.0):
  """Builds the local epoch of one client, for `vmap` over clients.

  Args:
    num_blocks: Number of blocks of each stage.
    input_shape: (height, width, channels).
    lr: Learning rate of Adam.
    mu: Strength of the proximal term.
    lam: lambda of the combination G_in + (lam / 2) G_loc.
    width: Multiplies the channels, rounded down.

  Returns:
    `init(key) -> variables`, and `epoch(variables, images, labels, pairs) ->
    variables` with images [S, B, H, W, C], labels [S, B], pairs (s_in, s_out).
  """
  features = tuple(int(64 * 2**stage * width) for stage in range(4))
  parts = {
      'extractor': Extractor(features[0]),
      'middle': Middle(num_blocks, features),
      'classifier': nn.Dense(10),
  }
  tx = optax.adam(lr)

  def init(key):
    x, variables = jnp.zeros((1, *input_shape)), {}
    for name, part in parts.items():
      x, variables[name] = part.init_with_output(key, x)
    params = {name: v['params'] for name, v in variables.items()}
    return params, {n: v.get('batch_stats', {}) for n, v in variables.items()}

  def apply(name, params, stats, x):
    variables = {'params': params[name], 'batch_stats': stats[name]}
    y, new = parts[name].apply(variables, x, mutable=['batch_stats'])
    return y, new.get('batch_stats', {})

  def local_loss(params, stats, x, y):
    new = {}
    for name in parts:
      x, new[name] = apply(name, params, stats, x)
    loss = optax.softmax_cross_entropy_with_integer_labels(x, y)
    return jnp.mean(loss), new

  def in_loss(middle, stats, pairs):
    out, _ = apply('middle', {'middle': middle}, stats, pairs[0])
    return jnp.mean((out - pairs[1]) ** 2)

  def client(variables, images, labels, pairs):
    anchor, stats = variables

    def step(carry, batch):
      params, stats, opt_state = carry
      grads, new_stats = jax.grad(local_loss, has_aux=True)(
          params, stats, *batch
      )
      grads = jax.tree.map(
          lambda g, w, a: g + mu * (w - a), grads, params, anchor
      )
      g_in = jax.grad(in_loss)(params['middle'], stats, pairs)
      grads['middle'] = jax.tree.map(
          lambda i, g: i + lam / 2 * g, g_in, grads['middle']
      )
      updates, opt_state = tx.update(grads, opt_state, params)
      params = optax.apply_updates(params, updates)
      return (params, new_stats, opt_state), None

    carry = (anchor, stats, tx.init(anchor))
    (params, stats, _), _ = jax.lax.scan(step, carry, (images, labels))
    return params, stats

  return init, client
