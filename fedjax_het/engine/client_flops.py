"""Floating-point operations of one client's visit, counted without running it.

As in `fedjax_het.models.flops`, the count covers the matrix products and
convolutions in the jaxpr of a visit, forward and backward. Loops count with
their number of iterations for the client's examples. A partial batch counts as
a whole one.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Visit,
)
from fedjax_het.kernels.lowering import conv_lowering
from fedjax_het.models.flops import program_flops


def client_flops(
    algorithm: FederatedAlgorithm, federation: Federation, data: FederatedData
) -> dict[str, float] | None:
  """Operations of a visit, the mean over the clients of each group.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    data: The federated data.

  Returns:
    {group: operations}; nothing is compiled. None if `visit_flops` raises an
    error.
  """
  try:
    return {
        group.name: float(np.mean(visit_flops(algorithm, group, data)))
        for group in federation.groups
    }
  except ValueError:
    return None


def visit_flops(
    algorithm: FederatedAlgorithm, group: Group, data: FederatedData
) -> list[int]:
  """Operations of a visit of each client of a group.

  If a client draws what it trains at random, such as its width, the most
  expensive draw counts.

  Args:
    algorithm: The algorithm.
    group: The group.
    data: The federated data.

  Returns:
    [clients of the group]; nothing is compiled.

  Raises:
    ValueError: If the length of a loop depends on anything but the number of
      examples.
  """
  key, client_id = jax.random.key(0), jnp.int32(group.client_ids[0])
  number = jnp.int32(0)
  before = Visit(client_id, number, key, number)
  server = jax.eval_shape(algorithm.init, key)
  client = jax.eval_shape(
      lambda key: algorithm.init_client(group, client_id, key), key
  )

  # The server makes it, so it is no work of the client.
  sent = jax.eval_shape(
      lambda server: algorithm.downlink(server, group, before), server
  )

  def visit(sent, client, key, round_num, turn, size):
    # Arguments are unknown to the count, except for the size.
    here = Visit(client_id, round_num, key, turn)
    return algorithm.client_update(
        group,
        client,
        sent,
        data.client(client_id).replace(size=size),
        here,
    )

  with conv_lowering('native'):
    program = jax.make_jaxpr(visit)(
        sent, client, key, number, number, number
    )
  sizes = np.asarray(data.sizes)[group.client_ids].tolist()
  counts = {
      size: program_flops(program, {len(program.in_avals) - 1: size})
      for size in set(sizes)
  }
  return [counts[size] for size in sizes]
