"""DepthFL: clients hold prefixes of one net, with a classifier at each depth.

The server holds theta, the full net with D classifiers. A client of level d has
the trunk up to the d-th classifier, with all classifiers before. In round t,
from 0, of the clients S, out of N:

  1. Client k receives theta_k, the leaves of its level.
  2. It trains its classifiers together, with logits z_1 .. z_d, p = softmax(z),
       L = sum_j CE(z_j) + w_t / (d - 1) sum_j sum_{m != j} KL(p_m || p_j)
           - <lambda_k, theta> + alpha / 2 ||theta - theta_k||^2,
     with the gradient stopped at p_m, and w_t = exp(-5 (1 - min(t, T) / T)^2)
     for a ramp of T rounds. The KL is absent for d = 1.
  3. lambda_k <- lambda_k - alpha (theta_k' - theta_k), theta_k' its result.
  4. For every leaf, over its c holders in S (FedDyn),
       mean <- (1 / c) sum_k theta_k',
       h <- h - alpha (c / N) (mean - theta),
       theta <- mean - h / alpha;
     without a holder, theta and h keep their values.

A prediction is the mean of the logits of the owned classifiers. With alpha = 0
there are no lambda_k and h, and theta <- mean ("DepthFL (FedAvg)" in the
authors' code). Running statistics are averaged and have no lambda_k and h.

References:
  Kim, Yu, Kim, Moon, `DepthFL: Depthwise Federated Learning for Heterogeneous
  Clients <https://openreview.net/forum?id=pf8RIZTMU58>`_, ICLR 2023; its
  authors' code for w_t, the sum of the losses and the norms.
  Acar et al., `Federated Learning Based on Dynamic Regularization
  <https://arxiv.org/abs/2111.04263>`_, ICLR 2021, for lambda_k and h.
"""

from collections.abc import Mapping
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.early_exits import exit_models
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms.depthfl.classifiers import classifiers, cuts_of
from fedjax_het.data.federated import Batch
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit, proximal_gradient
from fedjax_het.engine.needs import requires
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import between, not_negative


def ramp_up(round_num: jax.Array, length: float) -> jax.Array:
  """The weight w_t of distillation, which rises to 1 over the first rounds.

  Args:
    round_num: t, [] int32, from 0.
    length: T, in rounds; 0 for no ramp.

  Returns:
    [] float32.
  """
  if not length:
    return jnp.ones((), jnp.float32)
  # w_t = exp(-5 (1 - min(t, T) / T)^2).
  missing = 1 - jnp.minimum(round_num, length) / length
  return jnp.exp(-5 * missing**2).astype(jnp.float32)


def mutual_loss(
    logits: Mapping[str, jax.Array],
    batch: Batch,
    task: Task,
    gain: jax.Array | float,
) -> jax.Array:
  """The loss L of all classifiers of a client, without FedDyn's terms.

  Args:
    logits: {classifier: [B, C]}, z_1 .. z_d.
    batch: The minibatch.
    task: The loss of one classifier.
    gain: The factor on the mean divergence from the other classifiers.

  Returns:
    A float32 scalar.
  """
  found = tuple(logits.values())
  # sum_j CE(z_j).
  total = sum(task.loss(z, batch.y, batch.mask) for z in found)
  if len(found) == 1:
    return total
  # w_t / (d - 1) sum_j sum_{m != j} KL(p_m || p_j), without a gradient at p_m.
  gaps = sum(
      distillation(z, other) for z, other in itertools.permutations(found, 2)
  )
  return total + gain / (len(found) - 1) * masked_mean(gaps, batch.mask)


def prefixes(federation: Federation) -> dict[str, Group]:
  """{group name: the group with the prefix of its level as its model}."""
  cuts = cuts_of(federation.groups[0], federation)
  _, models = exit_models(federation, cuts)
  return {
      group.name: dataclasses.replace(group, model=models[group.name])
      for group in federation.groups
  }


@requires(
    one_model=True,
    group_options=dict(exit='1'),
    heads=classifiers,
    task='classification',
    num_rounds=True,
)
def depthfl(
    federation: Federation,
    *,
    distill_weight: float = 1.0,
    ramp: float = 0.3,
    alpha: float = 0.1,
) -> FederatedAlgorithm:
  """DepthFL with one level for each group.

  Args:
    federation: Groups, all of one model with the classifiers of all levels
      (`engine.needs.with_heads`), and local training. A group's option `exit`
      is its level: the share of the trunk's numbered blocks in front of its
      last classifier, such as '1/4'; '1', the default, is the full net.
    distill_weight: A factor on w_t, 1 in the paper; 0 for no distillation.
    ramp: T as a share of all rounds, in [0, 1]. Without
      `federation.num_rounds` there is no ramp, w_t = 1.
    alpha: FedDyn's strength; 0 for plain averaging.

  Returns:
    The algorithm. Server: (theta, h). Client: (its own statistics, lambda_k).
    lambda_k and h are () if `alpha` is 0.

  Raises:
    ValueError: If an option is out of range, or groups hold different models.
  """
  not_negative(distill_weight=distill_weight, alpha=alpha)
  between(0, 1, ramp=ramp)
  holders, local = prefixes(federation), federation.local
  length = ramp * (federation.num_rounds or 0)
  exchange = make_exchange(
      dataclasses.replace(federation, groups=tuple(holders.values())),
      'layerwise',
  )

  def init(key):
    theta = exchange.init(key)
    return theta, optax.tree.zeros_like(theta.params) if alpha else ()

  def init_client(group, client_id, key):
    del client_id
    group = holders[group.name]
    params = group.model.abstract_variables.params
    own = exchange.init_client(group, key)
    return own, optax.tree.zeros_like(params) if alpha else ()

  def client_update(group, client, sent, data, visit):
    group, (own, multiplier) = holders[group.name], client
    model, start = group.model, exchange.assemble(group, own, sent)
    gain = distill_weight * ramp_up(visit.round_num, length)

    def loss_fn(variables, batch, key):
      logits, stats = model.apply_heads(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
      return mutual_loss(logits, batch, local.task, gain), (stats, {})

    begin, linear = start, multiplier
    if local.drop_unused_weights:
      begin = model.trim(start)
      linear = model.trim(Variables(multiplier, {})).params if alpha else ()

    def regularise(grads, params):
      if not alpha:
        return grads
      # -lambda_k + alpha (theta - theta_k).
      grads = jax.tree.map(jnp.subtract, grads, linear)
      return proximal_gradient(grads, params, begin.params, alpha)

    end, _, metrics, num_steps = fit(
        loss_fn, local, begin, data, visit, grad_hook=regularise
    )
    end = model.fill(end, start)
    if alpha:
      # lambda_k <- lambda_k - alpha (theta_k' - theta_k).
      multiplier = jax.tree.map(
          lambda old, y, x: old - alpha * (y - x),
          multiplier, end.params, start.params,
      )  # fmt: skip
    own, delta = exchange.upload(group, start, end, data.size, num_steps)
    return (own, multiplier), Uplink(delta), metrics

  def server_update(server, received, turn):
    del turn
    theta, h = server
    if not alpha:
      return (exchange.collect(theta, received), ()), {}
    # h <- h - alpha / N sum_k (theta_k' - theta_k) of its holders.
    for group in federation.groups:
      change = received[group.name].summed.change
      moved = jax.tree.map(
          lambda old, total: old - alpha / federation.num_clients * total,
          {key: h[key] for key in change}, change,
      )  # fmt: skip
      h = {**h, **moved}

    def shift(mean, sent):
      # theta <- mean - h / alpha, with the new h.
      del sent
      return {
          key: jax.tree.map(lambda d, m: d - m / alpha, mean[key], h[key])
          for key in mean
      }

    return (exchange.collect(theta, received, revise=shift), h), {}

  def predict(group, variables, x):
    logits, _ = holders[group.name].model.apply_heads(variables, x)
    return sum(logits.values()) / len(logits)

  def predict_last(group, variables, x):
    return holders[group.name].model.apply(variables, x)[0]

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(
          server[0], holders[group.name]
      ),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          holders[group.name],
          client[0],
          exchange.download(server[0], holders[group.name]),
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
      predict=predict,
      views={'deepest': predict_last},
      trained_models=lambda group: (holders[group.name].model,),
  )
