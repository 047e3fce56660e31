"""Velo's conditional variational autoencoder of features, and its training."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.felo.rings import RingExamples, Rings
from fedjax_het.engine.local import fit
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import LocalTraining, Turn
from fedjax_het.models.blocks import Variables
from fedjax_het.models.layers import Linear
from fedjax_het.models.norm import BatchNorm

# A fold of a turn's key; training uses the key itself.
_GENERATE = 1


class CVAE(nn.Module):
  """The encoder q(u | f, y) and the decoder p(f | u, y).

  Latent vectors u and hidden layers have the width of the features. Its batch
  norm needs no running statistics, since the encoder is used in training only.

  Attributes:
    features: d.
    num_classes: C.
    label_size: The size of a label's embedding.
  """

  features: int
  num_classes: int
  label_size: int

  def setup(self):
    """Makes the layers."""
    shape = (self.num_classes, self.label_size)
    self.label = self.param('label', nn.initializers.normal(1.0), shape)
    self.encoder_hidden = Linear(self.features)
    self.encoder_norm = BatchNorm(momentum=None)
    self.encoder_output = Linear(2 * self.features)
    self.decoder_hidden = Linear(self.features)
    self.decoder_output = Linear(self.features)

  def encode(self, f, y, mask=None):
    """[B, d] features, [B] labels -> mu and log sigma^2, [B, d] each."""
    h = jnp.concatenate([f, self.label[y]], axis=1)
    h = self.encoder_norm(self.encoder_hidden(h), mask=mask)
    return jnp.split(self.encoder_output(jax.nn.relu(h)), 2, axis=1)

  def decode(self, u, y):
    """[B, d] latent vectors, [B] labels -> [B, d]; it is linear in both."""
    h = jnp.concatenate([u, self.label[y]], axis=1)
    return self.decoder_output(self.decoder_hidden(h))

  def __call__(self, f, y, noise, mask=None):
    """[B, d] f, [B] labels, [B, d] eps -> decoded f, mu, log sigma^2."""
    mu, log_var = self.encode(f, y, mask)
    # u = mu + sigma eps.
    return self.decode(mu + jnp.exp(0.5 * log_var) * noise, y), mu, log_var


def init_cvae(net: CVAE, key) -> Variables:
  """Draws the variables; there are no running statistics."""
  f, y = jnp.zeros((1, net.features)), jnp.zeros(1, jnp.int32)
  return Variables(net.init(key, f, y, f)['params'], {})


def kl_loss(mu, log_var, mask, reduction: str) -> jax.Array:
  """-1/2 (1 + log sigma^2 - mu^2 - sigma^2), summed or averaged.

  Args:
    mu: [B, d].
    log_var: [B, d], log sigma^2.
    mask: [B] bool, the rows that count.
    reduction: 'sum' over batch and latent dimensions, or their 'mean'.

  Returns:
    A scalar in nats, 0 where q is the standard normal.
  """
  kl = 0.5 * (jnp.square(mu) + jnp.exp(log_var) - 1.0 - log_var)
  if reduction == 'sum':
    return jnp.sum(jnp.where(mask[:, None], kl, 0.0))
  return masked_mean(jnp.mean(kl, axis=1), mask)


def cvae_loss(net: CVAE, reduction: str) -> Callable[..., Any]:
  """The loss of the CVAE, as `fit` takes it, on batches of (f, y)."""

  def loss_fn(variables, batch, key):
    noise = jax.random.normal(key, batch.x.shape)
    decoded, mu, log_var = net.apply(
        {'params': variables.params}, batch.x, batch.y, noise, batch.mask
    )
    # mean (f' - f)^2 + KL(q || N(0, I)).
    error = jnp.mean(jnp.square(decoded - batch.x), axis=1)
    error = masked_mean(error, batch.mask)
    kl = kl_loss(mu, log_var, batch.mask, reduction)
    metrics = dict(reconstruction_loss=error, kl_loss=kl)
    return error + kl, (variables.stats, metrics)

  return loss_fn


def cvae_training(
    learning_rate: float, epochs: int, batch_size: int
) -> LocalTraining:
  """Adam with a constant learning rate."""
  return LocalTraining(
      optax.adam, lambda round_num: learning_rate, epochs, batch_size
  )


def train_cvae(
    net: CVAE,
    variables: Variables,
    rings: Rings,
    due,
    training: LocalTraining,
    reduction: str,
    turn: Turn,
) -> tuple[Variables, dict[str, jax.Array]]:
  """Trains the CVAE on all stored features, with a new optimiser, if it is due.

  Args:
    net: The CVAE.
    variables: Its variables.
    rings: The features of each class, rows [C, L, d].
    due: [] bool.
    training: See `cvae_training`.
    reduction: See `kl_loss`.
    turn: The server's turn.

  Returns:
    The variables, and the metrics 'cvae_loss', 'reconstruction_loss' and
    'kl_loss'; without training the same variables, and NaN.
  """

  def train(variables):
    variables, _, metrics, _ = fit(
        cvae_loss(net, reduction),
        training,
        variables,
        RingExamples(rings),
        turn,
    )
    metrics['cvae_loss'] = metrics.pop('train_loss')
    return variables, metrics

  names = ('reconstruction_loss', 'kl_loss', 'cvae_loss')

  def skip(variables):
    return variables, {name: jnp.float32(jnp.nan) for name in names}

  return jax.lax.cond(due, train, skip, variables)


def generate(net: CVAE, variables: Variables, key) -> jax.Array:
  """f_bar[y] = decoder(eps_y, y) for every class y, [C, d].

  Args:
    net: The CVAE.
    variables: Its variables.
    key: The turn's key, from which eps_y ~ N(0, I) are drawn.
  """
  shape = net.num_classes, net.features
  eps = jax.random.normal(jax.random.fold_in(key, _GENERATE), shape)
  labels = jnp.arange(net.num_classes)
  return net.apply(
      {'params': variables.params}, eps, labels, method=net.decode
  )
