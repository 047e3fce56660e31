"""Peak memory of one client's visit, counted without compiling it.

The count goes through the jaxpr of a visit. An array is alive from the
operation that makes it to the last one that reads it. The peak is the largest
total size of arrays that are alive at once: activations, gradients, optimiser
state, batches and whatever else a method computes. The client's state and its
download are added. Operations are not fused, so the compiled program may need
less. The data set is not counted.
"""

import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Group
from fedjax_het.engine.visits import visit_pair


def client_memory(
    algorithm: FederatedAlgorithm, federation: Federation, data: FederatedData
) -> dict[str, int]:
  """Peak bytes of a visit, for the first client of each group.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    data: The federated data.

  Returns:
    {group: bytes}; nothing is compiled.
  """
  return {
      group.name: _visit_bytes(algorithm, group, data)
      for group in federation.groups
  }


def _visit_bytes(
    algorithm: FederatedAlgorithm, group: Group, data: FederatedData
) -> int:
  key, client_id = jax.random.key(0), jnp.int32(group.client_ids[0])
  server = jax.eval_shape(algorithm.init, key)
  client = jax.eval_shape(
      lambda key: algorithm.init_client(group, client_id, key), key
  )
  before, visit = visit_pair(key, jnp.int32(0), client_id)
  sent = jax.eval_shape(
      lambda server: algorithm.downlink(server, group, before), server
  )
  program = jax.make_jaxpr(
      lambda client, sent, data: algorithm.client_update(
          group, client, sent, data.client(client_id), visit
      )
  )(client, sent, data)
  given = sum(map(_bytes, jax.tree.leaves((client, sent))))
  return given + peak_bytes(program.jaxpr)


def _bytes(array: Any) -> int:
  """Bytes of an array, from its shape and dtype."""
  if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
    return 0  # A random key.
  return math.prod(array.shape) * array.dtype.itemsize


def peak_bytes(program: core.Jaxpr) -> int:
  """The largest total size of the arrays that are alive at once in a program.

  Args:
    program: A jaxpr. Its inputs and constants are not counted.

  Returns:
    Bytes.
  """
  last = {}
  for i, equation in enumerate(program.eqns):
    for name in equation.invars:
      if not isinstance(name, core.Literal):
        last[name] = i
  kept = {x for x in program.outvars if not isinstance(x, core.Literal)}
  alive, peak, ends = 0, 0, {}
  for i, equation in enumerate(program.eqns):
    made = 0
    for name in equation.outvars:
      size = _bytes(name.aval)
      made += size
      if name not in kept:
        end = last.get(name, i)
        ends[end] = ends.get(end, 0) + size
    inner = max(map(peak_bytes, _programs(equation)), default=0)
    if equation.primitive.name == 'scan':
      # The rows of earlier steps are there while the body runs.
      stacked = equation.outvars[equation.params['num_carry'] :]
      inner += sum(_bytes(name.aval) for name in stacked)
    peak = max(peak, alive + max(made, inner))
    alive += made - ends.pop(i, 0)
  return peak


def _programs(equation) -> list[core.Jaxpr]:
  """The jaxprs inside an equation, such as the body of a loop."""
  leaves = jax.tree.leaves(
      equation.params,
      is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
  )
  return [
      leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf
      for leaf in leaves
      if isinstance(leaf, core.Jaxpr | core.ClosedJaxpr)
  ]
