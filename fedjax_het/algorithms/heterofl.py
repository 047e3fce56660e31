"""HeteroFL: nested widths of one model, averaged entry by entry.

All groups hold the full model; client k trains its first ceil(rho_k d) of the
d channels of every hidden layer. One round:

  1. The client receives its slice of theta.
  2. It trains with three additions: activations are multiplied by 1 / rho_k
     in front of every norm (Scaler, in training only); norms keep no running
     statistics (static batch norm); logits of labels that it does not own are
     set to 0, not to -inf, so they stay in the softmax (masked loss).
  3. For every entry j, over the clients H_j of the round that hold it,
       theta_j <- (1 / |H_j|) sum_{k in H_j} theta_kj,
     unchanged if no client holds it. Only owners of a label hold its head row.

A client has the width of its group (`fixed_widths`), or draws one at every
visit (`drawn_widths`). In the latter case it also receives its level, and its
change has leaves of full size, of which only its slice is counted as traffic.

The full-width model is evaluated, or each group at its own width. With the norm
policy 'batch' its statistics are collected before every evaluation by a pass
over all training data; with 'batch_only' each test batch is normalised by its
own statistics.

The paper averages values; here changes from theta are averaged, which is
equivalent, and equals FedAvg bit for bit if all rates are 1. With batch norm
the Scaler only rescales epsilon. The paper's "local" evaluation, of the full
width with the label mask on the clients' own test shards, is left out.

References:
  Diao, Ding, Tarokh, `HeteroFL: Computation and Communication Efficient
  Federated Learning for Heterogeneous Clients
  <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
"""

from collections.abc import Mapping
from fractions import Fraction
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.aggregation.label_masks import MASKS
from fedjax_het.aggregation.narrow_training import check_head_rows
from fedjax_het.aggregation.server import (
  init_server_step,
  server_step,
  takes_server_options,
)
from fedjax_het.aggregation.slicing import (
  class_leaves,
  extract,
  make_level,
  mean_over_holders,
)
from fedjax_het.algorithms.heterofl_widths import (
  Plan,
  drawn_widths,
  fixed_widths,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.models.blocks import Variables
from fedjax_het.names import check_name
from fedjax_het.options import (
  at_least,
  group_shares,
  halvings,
  not_negative,
  one_of,
  share,
)


class Server(NamedTuple):
  """The server's state.

  Attributes:
    params: The full-width parameters.
    stats: Statistics by rate, for evaluation only.
    opt_state: {block: the server optimiser's state}; no array by default.
  """

  params: dict[str, Any]
  stats: dict[str, Any]
  opt_state: dict[str, Any]


@requires(
    one_model=True,
    group_options=dict(rate=None),
    local_stats=False,
    task='classification',
)
@takes_server_options()
def heterofl(
    federation: Federation,
    *,
    levels: tuple | list = (),
    odds: tuple | list = (),
    scaler: bool = True,
    mask: str = 'client',
    weights: str = 'uniform',
    left_out: tuple | str = (),
    calibrate_batches: int | None = None,
    evaluate: str = 'full',
    views: bool = False,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """HeteroFL with fixed or dynamic widths.

  Args:
    federation: Groups, all of one model, and local training. The paper clips
      gradients at a global norm of 1: `local.clip_norm`. A group's option
      `rate` is its width, such as '1/2'. If no group has one, widths are 1,
      1/2, 1/4, ... in the order of the groups' names.
    levels: Widths that clients draw from, such as ('1', '1/2'); () for 1, 1/2,
      1/4, ..., one for each of `odds`.
    odds: With one number per level, widths are dynamic: at every visit a client
      draws its level with these odds, whatever its group. () for fixed widths.
    scaler: Whether activations are multiplied by 1 / rate in training.
    mask: 'client' for the masked loss and head rows of owned labels, 'batch'
      for a loss masked by the labels of the minibatch, 'none'.
    weights: 'uniform' for the paper's mean over holders, 'data' for one
      weighted by the number of examples.
    left_out: Widths that are not aggregated: names of groups, or shares as in
      `levels`; a string for a single one. Their clients take part and train,
      but count as if they had taken no step.
    calibrate_batches: Maximum number of batches for static batch norm; None for
      all training data.
    evaluate: 'full' for the full width, 'own' for the width of each group, as
      FedIN v1 evaluates "the performance of local clients".
    views: Whether every narrower width is evaluated too.
    tx: The server's optimiser, applied to the mean over holders, with the
      options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, groups hold different models, or
      drawn widths are to be evaluated at each group's own.
  """
  groups, local = federation.groups, federation.local
  one_of('mask', mask, MASKS)
  one_of('weights', weights, ('uniform', 'data'))
  one_of('evaluate', evaluate, ('full', 'own'))
  if odds and evaluate == 'own':
    raise ValueError(
        "evaluate='own' is for fixed widths; with odds a group has no width of "
        'its own.'
    )
  if calibrate_batches is not None:
    at_least(1, calibrate_batches=calibrate_batches)
  full = groups[0].model
  given = {group.name: group.options for group in groups}
  # The only place that distinguishes both variants.
  if odds:
    rates = drawn_rates(given, levels, odds)
    make_widths = functools.partial(drawn_widths, odds=odds)
  else:
    rates = fixed_rates(given, levels)
    level_of = {name: i for i, name in enumerate(rates)}
    make_widths = functools.partial(fixed_widths, level_of=level_of)
  if isinstance(left_out, str):
    left_out = (left_out,) if left_out else ()
  for name in left_out:
    if len(str(name).split()) > 1:
      raise ValueError(
          'left_out must be a tuple of names, such as '
          f'{tuple(name.split())}, got {name!r}.'
      )
    check_name('left_out', name, rates)
  trained = [make_level(full, rate) for rate in rates.values()]
  check_head_rows(full, mask)
  widths = make_widths(Plan(
      levels=trained,
      left_out=[name in left_out for name in rates],
      of_classes=class_leaves(full),
      local=local,
      scaler=scaler,
      mask=mask,
      weights=weights,
  ))  # fmt: skip
  full_rate = _name(1.0)
  differ = {float(rate) for rate in rates.values()} | {1.0}
  if len({*map(_name, differ)}) < len(differ):
    raise ValueError(
        f'The rates {sorted(differ)} must differ in their first four digits.'
    )
  evaluated = {}
  if evaluate == 'full':
    evaluated[full_rate] = make_level(full, Fraction(1))
  if views or evaluate == 'own':
    evaluated.update((_name(level.rate), level) for level in trained)

  def init(key):
    variables = full.init(key)
    # Placeholders; `calibrate` computes the statistics before evaluation.
    stats = {
        name: _zeros(level.model.abstract_variables.stats)
        for name, level in evaluated.items()
    }
    opt_state = init_server_step(tx, variables.params)
    return Server(variables.params, stats, opt_state)

  def server_update(server, received, turn):
    del turn
    total = count = _zeros(server.params)
    for group in groups:
      total, count = widths.add(
          total, count, group, received[group.name].summed
      )
    # D_j = sum_{k in H_j} (theta_kj - theta_j) / |H_j|
    mean, held = mean_over_holders(total, count)
    # theta_j <- theta_j + D_j, or another step of the server.
    params, opt_state = server_step(
        tx, server.params, server.opt_state, mean, held
    )
    return server._replace(params=params, opt_state=opt_state), {}

  def calibrate(server, data):
    stats = {
        name: static_statistics(
            level.model,
            extract(server.params, level.index),
            data,
            batch_size=local.batch_size,
            num_batches=calibrate_batches,
        )
        for name, level in evaluated.items()
    }
    return server._replace(stats=stats)

  def sent_shares(group, sizes):
    """The mean over the drawn levels; of the head, all rows."""
    del group, sizes
    held = [level.model.num_params for level in trained]
    mean = np.average(held, weights=odds) / full.num_params
    return mean, mean

  predictions = {
      name: functools.partial(_predict, name, level)
      for name, level in evaluated.items()
  }
  if evaluate == 'own':
    own = {k: predictions[_name(float(rate))] for k, rate in rates.items()}

    def predict(group, server, x):
      return own[group.name](group, server, x)

  else:
    predict = predictions[full_rate]
  narrower = {k: v for k, v in predictions.items() if k != full_rate}
  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=widths.downlink,
      client_update=widths.client_update,
      server_update=server_update,
      client_model=lambda server, client, group: server,
      one_model=evaluate == 'full',
      predict=predict,
      views=narrower if views else {},
      calibrate=calibrate if full.abstract_variables.stats else None,
      sent_shares=sent_shares if odds else None,
      trained_models=lambda group: (widths.largest(group).model,),
  )


def fixed_rates(
    groups: Mapping[str, Mapping[str, Any]], levels: tuple
) -> dict[str, Fraction]:
  """The widths of groups, by the names that `left_out` takes.

  Args:
    groups: {group name: the group's options}.
    levels: As for `heterofl`, which must be empty.

  Returns:
    {group name: rate}.

  Raises:
    ValueError: If a rate is out of range, or `levels` is not empty.
  """
  if levels:
    raise ValueError(
        f'levels={tuple(levels)} are drawn with odds; give one number of '
        'odds for each, or a rate to each group for fixed widths.'
    )
  return group_shares('rate', groups)


def drawn_rates(
    groups: Mapping[str, Mapping[str, Any]], levels: tuple, odds: tuple
) -> dict[str, Fraction]:
  """The widths that clients draw from, by the names that `left_out` takes.

  Args:
    groups: {group name: the group's options}, which must not contain `rate`.
    levels: As for `heterofl`.
    odds: As for `heterofl`, at least one.

  Returns:
    {share as in `levels`: rate}.

  Raises:
    ValueError: If levels or odds are out of range or do not fit together, or a
      group has a rate.
  """
  not_negative(**{f'odds[{i}]': odd for i, odd in enumerate(odds)})
  if sum(odds) <= 0:
    raise ValueError(
        f'odds must be at least 0, and not only zeros, got {tuple(odds)}.'
    )
  for name, options in groups.items():
    if options.get('rate', '') not in ('', None):
      raise ValueError(
          f'groups.{name}.rate is for fixed widths; with odds clients draw '
          'from levels.'
      )
  if not levels:
    return halvings(str(Fraction(1, 2**i)) for i in range(len(odds)))
  rates = {
      str(level): share(f'levels[{i}]', level) for i, level in enumerate(levels)
  }
  if not len(rates) == len(levels) == len(odds):
    raise ValueError(
        f'levels must be {len(odds)} different shares, one for each of odds, '
        f'got {tuple(levels)}.'
    )
  return rates


def _predict(name, level, group, server, x):
  """Logits of one width of the server's model."""
  del group
  params = extract(server.params, level.index)
  return level.model.apply(Variables(params, server.stats[name]), x)[0]


def _name(rate: float) -> str:
  return f'rate_{rate:.4g}'


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)
