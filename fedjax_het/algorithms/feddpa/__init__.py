"""FedDPA: a client keeps the entries that matter most for its own data.

Client k keeps its whole model w_k, the server x; all start equal. A visit:

  1. Receive x. Over the client's examples, with one gradient for each,
       F = mean (d log p(y | input; w_k) / d w_k)^2,
     scaled to [0, 1] in each tensor. M = 1 (personal) where F > tau.
  2. w <- M w_k + (1 - M) x
  3. E epochs that train the entries with M = 1 on
       CE + lambda1 / 2 R,              R = sum_l ||w_l - x_l|| over tensors l
  4. E epochs that train the entries with M = 0 on
       CE + lambda2 / 2 |R - C|
     Each phase resets its optimiser; a phase without entries is skipped.
  5. w_k <- w. Send U = w - x, all entries, optionally clipped and with noise:
       U / max(1, ||U|| / S) + N(0, S^2 sigma^2 / N)        for N clients.
  6. x <- x + weighted mean of what was sent.

The clients' models w_k are evaluated, and x as the view 'global'. F is computed
in inference mode with norm statistics of the client's examples, because the
running statistics still have their initial values at a first visit.

The paper's text has one norm for personal and one for shared parameters. Here,
as in its code, R in both phases is the sum over all tensors. That code never
leaves inference mode after the Fisher pass; here both phases train in training
mode. It always clips and adds noise, with S = C; here both are off by default.
The noise in the mean is far below what its accountant assumes, so no (epsilon,
delta) is claimed.

The module exceeds 200 lines with its docstrings; its code has about 100.

References:
  Yang, Huang, Ye, `Dynamic Personalized Federated Learning with Adaptive
  Differential Privacy <https://openreview.net/forum?id=RteNLuc8D9>`_, NeurIPS
  2023.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.personal_entries import (
  PersonalModel,
  blend,
  fit_masked,
  fraction,
  predict_shared,
)
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.algorithms.feddpa.fisher import (
  fisher,
  personal_entries,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables
from fedjax_het.options import between, not_negative, positive


def distance(params, anchor) -> jax.Array:
  """R = sum_l ||w_l - x_l||, with a gradient of 0 where w_l = x_l."""

  def norm(w, x):
    squares = jnp.sum(jnp.square(w - x))
    safe = jnp.where(squares > 0, squares, 1.0)
    return jnp.where(squares > 0, jnp.sqrt(safe), 0.0)

  # R = sum_l ||w_l - x_l||
  return sum(jax.tree.leaves(jax.tree.map(norm, params, anchor)))


def penalised(strength, aim, anchor):
  """Adds the gradient of lambda / 2 |R - C| to the gradient of a loss.

  Args:
    strength: [], lambda.
    aim: [], C.
    anchor: x, {block: tree}.

  Returns:
    A `grad_hook`, as `fit_model` takes it.
  """

  def penalty(params):
    # lambda / 2 |R - C|
    return strength / 2 * jnp.abs(distance(params, anchor) - aim)

  def hook(grads, params):
    # g <- g + grad (lambda / 2 |R - C|)
    return jax.tree.map(jnp.add, grads, jax.grad(penalty)(params))

  return hook


def released(update, clip: float, sigma: float, num_clients: int, key):
  """U / max(1, ||U|| / S) + N(0, S^2 sigma^2 / N).

  Args:
    update: U, a tree.
    clip: S.
    sigma: Standard deviation of the noise, in units of S / sqrt(N).
    num_clients: N.
    key: A random key.

  Returns:
    A tree like `update`.
  """
  # U <- U / max(1, ||U|| / S)
  factor = jnp.maximum(1.0, optax.global_norm(update) / clip)
  update = jax.tree.map(lambda u: u / factor, update)
  if not sigma:
    return update
  # U <- U + S sigma / sqrt(N) z,  z ~ N(0, 1)
  noise = optax.tree.random_like(key, update)
  scale = clip * sigma / num_clients**0.5
  return jax.tree.map(lambda u, z: u + scale * z, update, noise)


@requires()
@takes_server_options()
def feddpa(
    federation: Federation,
    *,
    threshold: float = 0.4,
    lambda1: float = 0.1,
    lambda2: float = 0.05,
    target: float = 0.5,
    clip: float | None = None,
    sigma: float = 0.0,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedDPA over clients of one or several architectures.

  Args:
    federation: Groups and local training; `local.epochs` is E, the epochs of
      each phase.
    threshold: tau in [-1, 1]; -1 makes all entries personal, 1 none.
    lambda1: Strength of the penalty of the personal phase.
    lambda2: Strength of the penalty of the shared phase.
    target: C, the distance that the shared phase aims at.
    clip: S, the largest norm of an update that is sent; None for no limit.
    sigma: Standard deviation of the noise in units of S / sqrt(N); above 0 it
      needs `clip`.
    aggregation: As for `fedavg`.
    weights: As for `fedavg`; the authors' code has 'data'.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm; its client state is the client's whole model.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  between(-1, 1, threshold=threshold)
  not_negative(lambda1=lambda1, lambda2=lambda2, target=target, sigma=sigma)
  if clip is not None:
    positive(clip=clip)
  elif sigma:
    raise ValueError(f'sigma must be 0 without a clip, got {sigma}.')
  exchange = make_exchange(federation, aggregation, weights, tx=tx)
  local, task = federation.local, federation.task

  def train(group, w_k, x, data, visit):
    """Steps 1 to 4: the new w, metrics and the number of steps."""
    model = group.model
    information = fisher(model, task, local, w_k.params, data)
    mask = personal_entries(information, threshold)
    # w <- M w_k + (1 - M) x.
    start = Variables(blend(mask, w_k.params, x.params), x.stats)

    def phase(w, setting):
      mask, key, strength, aim = setting
      w, _, metrics, num = fit_masked(
          model, local, w, data, visit._replace(key=key), mask,
          grad_hook=penalised(strength, aim, x.params),
      )  # fmt: skip
      return w, (metrics['train_loss'], num)

    # Steps 3 and 4 differ only in values, so they are one scanned program.
    w, (losses, nums) = jax.lax.scan(phase, start, (
        jax.tree.map(lambda m: jnp.stack([m, ~m]), mask),
        jnp.stack([jax.random.fold_in(visit.key, 1), visit.key]),
        jnp.array([lambda1, lambda2]),
        jnp.array([0.0, target]),
    ))  # fmt: skip
    metrics = dict(
        train_loss=jnp.sum(nums * losses) / jnp.maximum(jnp.sum(nums), 1),
        personal_share=fraction(mask),
    )
    return w, metrics, jnp.sum(nums)

  def client_update(group, w_k, sent, data, visit):
    x = exchange.assemble(group, w_k, sent)
    w, metrics, num = train(group, w_k, x, data, visit)
    # p_k U.
    _, delta = exchange.upload(group, x, w, data.size, num)
    if clip is not None:
      # U = w - x.
      update = jax.tree.map(jnp.subtract, w.params, x.params)
      update, _ = exchange.sharing.split(group, update)
      key = jax.random.fold_in(visit.key, 2)
      update = released(update, clip, sigma, federation.num_clients, key)
      change = jax.tree.map(lambda u: delta.weight * u, update)
      delta = delta._replace(change=change)
    return w, Uplink(delta), metrics

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=lambda group, client_id, key: group.model.init(key),
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      # x <- x + sum p_k U / sum p_k.
      server_update=lambda server, received, turn: (
          exchange.collect(server, received), {}
      ),
      client_model=lambda server, client, group: PersonalModel(
          *client,
          exchange.assemble(group, client, exchange.download(server, group)),
      ),
      personal=True,
      views={'global': predict_shared},
  )
