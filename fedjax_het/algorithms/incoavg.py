"""InCoAvg: corrects the change of deep layers by that of a shallow layer.

Few clients own deep layers. After FedAvg's mean over the owners of each leaf,
the server corrects the mean change g_l of a layer by g_0, the mean change of
the first layer of the same shape in its stage:

  theta = clip(|<g_0, g_l>| / <g_0, g_0>, 0, 5)
  u     = (g_l / ||g_l|| + theta g_0 / ||g_0||) (||g_l|| + ||g_0||) / 2
  x_l  <- x_l + clip(u, -0.1, 0.1)

In a convolution, products and norms are over each k x k kernel (one pair of an
input and an output channel); in any other leaf, over the whole leaf. Where
norms and <g_0, g_0> are divisors, 1e-7 is added to them.

This is the rule of the authors' code ('code'). In place of theta the paper
prints -<g_0, g_l> / <g_0, g_0> ('paper', with the code's bounds). It derives
this from its Theorem 3.1, whose solution is g_l if <g_0, g_l> >= 0, else the
projection g_l - <g_0, g_l> / <g_0, g_0> g_0 ('theorem', which neither
normalises nor clips). For a positive product, theta has opposite signs in
'code' and 'paper'.

The same leaves are corrected as in the authors' code. In a stage, a convolution
whose shape occurs in an earlier block is corrected by the last convolution of
this shape in the first such block. In a transformer's encoder block, the scale
of the second norm is corrected by that of the first. Here stages of dense
layers (`layer1`, `layer2`) are treated like convolutions. Other leaves move by
their mean change; running statistics become their mean.

References:
  Chan, Zhou, Zhao, Jiang, Ngai, `Internal Cross-Layer Gradients for Extending
  Homogeneity to Heterogeneity in Federated Learning
  <https://openreview.net/forum?id=Cc0qk6r4Nd>`_, ICLR 2024, Theorem 3.1.
"""

from collections.abc import Mapping
import re
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.options import one_of, positive

RULES = ('code', 'paper', 'theorem')
_EPS = 1e-7

Path = tuple[str, ...]


def _stages(params: Mapping[str, Any]) -> list[list[str]]:
  """Lists of keys that differ only in their final number, in its order."""
  stages = {}
  for key in params:
    name, number = re.fullmatch(r'(.*?)(\d*)', key, re.DOTALL).groups()
    if number:
      stages.setdefault(name, {})[int(number)] = key
  return [[stage[n] for n in sorted(stage)] for stage in stages.values()]


def _inside(key: str, tree: Mapping[str, Any]) -> tuple[Path, Any]:
  """A block's path and layers, inside of modules that only call another."""
  path = (key,)
  while len(tree) == 1:
    name, inner = next(iter(tree.items()))
    parts = [inner, *inner.values()] if isinstance(inner, Mapping) else [inner]
    if not all(isinstance(part, Mapping) for part in parts):
      break
    path, tree = (*path, name), inner
  return path, tree


def _kernels(
    place: Path, tree: Mapping[str, Any]
) -> dict[Path, tuple[int, ...]]:
  """Shapes of a block's kernels, except those of shortcuts."""
  return {
      (*place, *path): leaf.shape
      for path, leaf in sorted(flatten_dict(tree).items())
      if path[-1] == 'kernel' and 'shortcut' not in path[0]
  }


def _is_encoder(tree: Mapping[str, Any]) -> bool:
  """Whether it is a transformer's block: two norms and no convolution."""
  kernels = _kernels((), tree).values()
  return {'norm1', 'norm2'} <= tree.keys() and all(len(k) < 4 for k in kernels)


def layer_pairs(params: Mapping[str, Any]) -> list[tuple[Path, Path]]:
  """The leaves to correct, each with its reference.

  Args:
    params: {key: tree}, the server's parameters, or their shapes.

  Returns:
    Pairs of paths, which begin with the key.
  """
  pairs = []
  for stage in _stages(params):
    first = {}
    for key in stage:
      place, layers = _inside(key, params[key])
      if _is_encoder(layers):
        pairs.append(((*place, 'norm2', 'scale'), (*place, 'norm1', 'scale')))
        continue
      kernels = _kernels(place, layers)
      pairs += [(p, first[shape]) for p, shape in kernels.items()
                if shape in first]  # fmt: skip
      # If several kernels have one shape, keep the last of the first block.
      first = {shape: path for path, shape in kernels.items()} | first
  return pairs


def corrected(
    g, reference, *, rule: str, max_ratio: float, max_change: float
) -> jax.Array:
  """Corrects the change of a leaf by that of its reference.

  Args:
    g: g_l; in a 4-D array the first two axes are those of the k x k kernels.
    reference: g_0, of the same shape.
    rule: One of `RULES`.
    max_ratio: Bound of theta; unused by 'theorem'.
    max_change: Bound of every entry of the result; unused by 'theorem'.

  Returns:
    An array like `g`.
  """
  axes = (0, 1) if g.ndim == 4 else None

  def total(array):
    return jnp.sum(array, axis=axes, keepdims=True)

  # alpha = <g_0, g_0>, beta = <g_0, g_l>.
  alpha, beta = total(reference * reference), total(reference * g)
  if rule == 'theorem':
    # g_l if beta >= 0, else g_l - beta / alpha g_0.
    ratio = jnp.where(beta < 0, beta / jnp.where(alpha > 0, alpha, 1.0), 0.0)
    return g - ratio * reference
  # theta = clip(|beta| / alpha, 0, 5), or for 'paper' -clip(beta / alpha).
  ratio = jnp.clip(beta / (alpha + _EPS), -max_ratio, max_ratio)
  theta = jnp.abs(ratio) if rule == 'code' else -ratio
  # u = (g_l / ||g_l|| + theta g_0 / ||g_0||) (||g_l|| + ||g_0||) / 2
  norm, norm_0 = jnp.sqrt(total(g * g)), jnp.sqrt(alpha)
  direction = g / (norm + _EPS) + theta * reference / (norm_0 + _EPS)
  u = direction * (norm + norm_0) / 2
  return jnp.clip(u, -max_change, max_change)


@requires(keep_optimizer=False)
@takes_server_options()
def incoavg(
    federation: Federation,
    *,
    rule: str = 'code',
    max_ratio: float = 5.0,
    max_change: float = 0.1,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """InCo Aggregation over FedAvg.

  Args:
    federation: Groups and local training. If no two leaves form a pair, such
      as when all clients hold a ResNet10, the method is FedAvg.
    rule: 'code', 'paper' or 'theorem', see above.
    max_ratio: Bound of theta, 5 in the authors' code.
    max_change: Bound of the change of a corrected entry in a round, 0.1 in the
      authors' code.
    aggregation: As for `fedavg`; with 'architecture' the layers of one
      architecture correct each other.
    weights: As for `fedavg`; 'uniform' in the paper.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm; server and clients hold what they hold in FedAvg.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  one_of('rule', rule, RULES)
  positive(max_ratio=max_ratio, max_change=max_change)
  exchange = make_exchange(federation, aggregation, weights, tx=tx)

  def cross_layer(mean, sent):
    g = flatten_dict(mean, keep_empty_nodes=True)
    new = dict(g)
    for leaf, reference in layer_pairs(mean):
      u = corrected(
          g[leaf], g[reference], rule=rule, max_ratio=max_ratio,
          max_change=max_change,
      )  # fmt: skip
      # If no client sent the reference, the leaf keeps its own change.
      new[leaf] = jnp.where(sent[reference[0]], u, g[leaf])
    return unflatten_dict(new)

  plain = average_weights(exchange, *model_training(federation.local))
  return plain._replace(
      server_update=lambda server, received, turn: (
          exchange.collect(server, received, revise=cross_layer), {}
      )
  )
