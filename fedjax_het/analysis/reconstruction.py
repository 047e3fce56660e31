"""Reconstruction of images from the features that a client has uploaded.

This is FedIN's attack (journal version, Section 4.3 and Fig. 10), which follows
dataset distillation. The adversary knows the extractor f(.; w_e) and the
features s of a batch of images. Starting from random pixels, it minimises

  mean (f(x; w_e) - s)^2 + tv TV(x),   x in [0, 1],

by Adam with w_e frozen, and projects the pixels onto [0, 1] after each step. TV
is the total variation and `tv` its coefficient.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.options import at_least, not_negative, positive


class Reconstruction(NamedTuple):
  """Images that an attack reconstructs.

  Attributes:
    images: [S, N, H, W, C] float32 in [0, 1], at S equidistant steps; the last
      N are the result.
    error: [S] float32, mean (f(x; w_e) - s)^2 of these images.
    step: [S] int32, the number of steps taken.
  """

  images: jax.Array
  error: jax.Array
  step: jax.Array


def total_variation(images):
  """Mean absolute difference of neighbouring pixels.

  Args:
    images: [N, H, W, C].

  Returns:
    [], the mean over vertical neighbours plus that over horizontal ones.
  """
  return jnp.mean(jnp.abs(jnp.diff(images, axis=1))) + jnp.mean(
      jnp.abs(jnp.diff(images, axis=2))
  )


def make_attack(
    extract: Callable[[jax.Array], jax.Array],
    image_shape: tuple[int, int, int],
    *,
    steps: int = 2000,
    learning_rate: float = 0.05,
    tv: float = 0.0,
    num_snapshots: int = 20,
) -> Callable[[jax.Array, jax.Array], Reconstruction]:
  """Creates the attack on an extractor.

  Args:
    extract: f(.; w_e), a function from [N, H, W, C] images in [0, 1] to their
      features; its parameters are constants.
    image_shape: (H, W, C).
    steps: Steps of Adam, at least `num_snapshots`, rounded down to a multiple
      of it.
    learning_rate: Initial learning rate, which decays to 0 by a half cosine.
    tv: Coefficient of the total variation, which favours smooth images; 0 is
      the paper's objective.
    num_snapshots: S, the number of intermediate results.

  Returns:
    `(feature, key) -> Reconstruction`, compiled. `feature` [N, ...] is what the
    adversary has received; `key` draws the initial pixels.

  Raises:
    ValueError: If an option is out of its range.
  """
  at_least(1, num_snapshots=num_snapshots)
  at_least(num_snapshots, steps=steps)
  positive(learning_rate=learning_rate)
  not_negative(tv=tv)
  stride = steps // num_snapshots
  schedule = optax.cosine_decay_schedule(learning_rate, stride * num_snapshots)
  tx = optax.adam(schedule)

  def error_of(images, feature):
    return jnp.mean(jnp.square(extract(images) - feature))

  @jax.jit
  def attack(feature, key):
    def loss(images):
      return error_of(images, feature) + tv * total_variation(images)

    def step(carry, _):
      images, opt_state = carry
      updates, opt_state = tx.update(jax.grad(loss)(images), opt_state)
      images = optax.apply_updates(images, updates)
      return (optax.projections.projection_box(images, 0.0, 1.0), opt_state), ()

    def snapshot(carry, _):
      carry, _ = jax.lax.scan(step, carry, length=stride)
      return carry, (carry[0], error_of(carry[0], feature))

    start = jax.random.uniform(key, (len(feature), *image_shape))
    _, (images, error) = jax.lax.scan(
        snapshot, (start, tx.init(start)), length=num_snapshots
    )
    return Reconstruction(
        images, error, stride * jnp.arange(1, num_snapshots + 1)
    )

  return attack
