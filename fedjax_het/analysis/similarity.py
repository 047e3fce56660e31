"""Similarity of network layers: linear CKA and mean squared CCA.

References:
  Kornblith et al., `Similarity of Neural Network Representations Revisited
  <https://arxiv.org/abs/1905.00414>`_, ICML 2019, Table 1; FeDepth's Fig. 6.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.models.blocks import BlockModel
from fedjax_het.names import check_name


def _centred(features, name) -> np.ndarray:
  features = np.asarray(features, np.float64)
  if features.ndim != 2 or len(features) < 2:
    raise ValueError(
        f'{name} must be [n, d] with n of at least 2, got shape '
        f'{features.shape}.'
    )
  return features - features.mean(axis=0)


def linear_cka(x, y) -> float:
  """Linear centred kernel alignment of two representations.

  Args:
    x: [n, p] features of n examples.
    y: [n, q] features of the same examples.

  Returns:
    ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F) of the centred features, in [0, 1];
    invariant to orthogonal maps and isotropic scaling of x or y. NaN if x or y
    is constant.

  Raises:
    ValueError: If the shapes are wrong.
  """
  x, y = _pair(x, y)
  with np.errstate(invalid='ignore', divide='ignore'):
    return float(
        np.sum((y.T @ x) ** 2)
        / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    )


def mean_cca(x, y) -> float:
  """Mean squared canonical correlation of two representations.

  Args:
    x: [n, p] features of n examples.
    y: [n, q] features of the same examples.

  Returns:
    The mean of rho_i^2 over the min(rank x, rank y) canonical correlations of
    the centred features, in [0, 1]; invariant to invertible linear maps of x
    or y. It is 1 for any features if both ranks are n - 1, so use many more
    examples than features. NaN if x or y is constant.

  Raises:
    ValueError: If the shapes are wrong.
  """
  bases = [_basis(features) for features in _pair(x, y)]
  rank = min(basis.shape[1] for basis in bases)
  if not rank:
    return float('nan')
  return float(np.sum((bases[1].T @ bases[0]) ** 2) / rank)


def _pair(x, y):
  x, y = _centred(x, 'x'), _centred(y, 'y')
  if len(x) != len(y):
    raise ValueError(
        f'x and y must hold the same examples, got {len(x)} and {len(y)}.'
    )
  return x, y


def _basis(features):
  """An orthonormal basis of the column space of `features`."""
  left, values, _ = np.linalg.svd(features, full_matrices=False)
  largest = values[:1].sum()
  tolerance = largest * max(features.shape) * np.finfo(np.float64).eps
  return left[:, values > tolerance]


def block_features(
    model: BlockModel, variables: Any, x: jax.Array
) -> dict[str, np.ndarray]:
  """Computes the output of every block, in inference mode.

  Args:
    model: The architecture.
    variables: Its variables.
    x: [n, H, W, C] inputs.

  Returns:
    {block name: [n, d] float32}, averaged over pixels or tokens.
  """

  @jax.jit
  def run(variables, x):
    features = []
    for position in range(len(model.blocks)):
      x, _ = model.apply(variables, x, start=position, stop=position + 1)
      middle = tuple(range(1, x.ndim - 1))
      features.append(jnp.mean(x, axis=middle) if middle else x)
    return features

  return dict(
      zip(model.block_names, map(np.asarray, run(variables, x)), strict=True)
  )


def stages(model: BlockModel) -> dict[str, str]:
  """The stages before a model's classifier.

  Blocks 'stage2_block0' and 'stage2_block1' form the stage 'stage2'; a block
  with another name is a stage by itself. Blocks without parameters, such as
  the pooling before the classifier, are left out.

  Args:
    model: The architecture.

  Returns:
    {stage: name of its last block}, in order.
  """
  params = model.abstract_variables.params
  return {
      name.partition('_block')[0]: name
      for name in model.span(0, model.cut[1])
      if params[name]
  }


def stage_block(model: BlockModel, stage: str) -> str:
  """The last block of a stage.

  Args:
    model: The architecture.
    stage: Name of a stage, or of a block, which is returned as it is.

  Returns:
    The name of the block.

  Raises:
    ValueError: If the model has no such stage or block.
  """
  known = {**stages(model), **{name: name for name in model.block_names}}
  check_name(f'stage of {model.name}', stage, known)
  return known[stage]


def pairwise(features: Sequence[np.ndarray], measure=linear_cka) -> np.ndarray:
  """Similarity of the same stage in all pairs of networks.

  Args:
    features: [n, d] of each of N networks; d may differ.
    measure: `linear_cka` or `mean_cca`.

  Returns:
    [N, N], symmetric, 1 on the diagonal; NaN elsewhere in the rows and columns
    of networks whose features are constant.

  Raises:
    ValueError: If there are fewer than two networks, or shapes are wrong.
  """
  if len(features) < 2:
    raise ValueError(
        f'Similarity needs at least 2 networks, got {len(features)}.'
    )
  matrix = np.eye(len(features))
  for i, one in enumerate(features):
    for j, other in enumerate(features[:i]):
      matrix[i, j] = matrix[j, i] = measure(one, other)
  return matrix


def mean_of_pairs(matrix: np.ndarray) -> float:
  """The mean of a `pairwise` matrix [N, N] without its diagonal."""
  return float(np.mean(matrix[~np.eye(len(matrix), dtype=bool)]))


def mean_similarity(
    clients: Sequence[Mapping[str, np.ndarray]], measure=linear_cka
) -> np.ndarray:
  """Mean similarity of all pairs of layers of two clients.

  Args:
    clients: Results of `block_features`, one per client, of one architecture.
    measure: `linear_cka` or `mean_cca`.

  Returns:
    [layers, layers], the mean over all ordered pairs of different clients.

  Raises:
    ValueError: If there are fewer than two clients.
  """
  if len(clients) < 2:
    raise ValueError(
        f'Similarity needs at least 2 clients, got {len(clients)}.'
    )
  layers = list(clients[0])
  total, pairs = np.zeros((len(layers), len(layers))), 0
  for i, one in enumerate(clients):
    for other in clients[i + 1 :]:
      values = np.array(
          [[measure(one[a], other[b]) for b in layers] for a in layers]
      )
      total += values + values.T
      pairs += 2
  return total / pairs
