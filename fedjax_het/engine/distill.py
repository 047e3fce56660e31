"""The divergence of a student's outputs from a teacher's.

References:
  Hinton, Vinyals, Dean, `Distilling the Knowledge in a Neural Network
  <https://arxiv.org/abs/1503.02531>`_, 2015.
"""

import jax
import jax.numpy as jnp

from fedjax_het.options import positive


def distillation(
    student, teacher, temperature: float = 1.0, *, detach: bool = True
) -> jax.Array:
  """T^2 KL(softmax(teacher / T) || softmax(student / T)) of each example.

  Its gradient in the student's logits is T (p_student - p_teacher), with
  probabilities at temperature T.

  Args:
    student: [B, C] logits.
    teacher: [B, C] logits.
    temperature: T, above 0; an array, maybe traced, is not checked.
    detach: Whether to stop gradients into the teacher's logits.

  Returns:
    [B] in nats.

  Raises:
    ValueError: If `temperature` is a number that is not above 0, or not finite.
  """
  if not isinstance(temperature, jax.Array):
    positive(temperature=temperature)
  if detach:
    teacher = jax.lax.stop_gradient(teacher)
  log_p = jax.nn.log_softmax(teacher / temperature)
  log_q = jax.nn.log_softmax(student / temperature)
  return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
