"""Runs a function written for one client over many: the backends.

Every backend has one contract, `mapped(shared, args, num_valid)`, and all
agree up to the rounding of sums. How clients are mapped is a choice made
outside the algorithm.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.engine.balance import deal
from fedjax_het.kernels.lowering import conv_lowering

BACKENDS = ('auto', 'loop', 'map', 'vmap', 'shard_map', 'pmap')
# Clients that 'vmap' batches at once by default: memory stays bounded however
# large a cohort is. Not measured on an accelerator.
DEFAULT_CHUNK = 16
# The backends that can be traced into a larger compiled program.
TRACEABLE = ('map', 'vmap', 'shard_map')
ACROSS_DEVICES = ('shard_map', 'pmap')


def resolve_backend(backend: str) -> str:
  """Picks the backend for 'auto' and refuses unknown names.

  On a CPU one client after another inside one program ('map') is fastest:
  batching over kernels turns convolutions into slow grouped ones. On other
  platforms 'vmap' fills the device; that choice has not been measured. A run
  of several processes always splits the clients over all devices.

  Args:
    backend: One of `BACKENDS`.

  Returns:
    One of `BACKENDS` other than 'auto'.

  Raises:
    ValueError: If the name is unknown, or several processes cannot run it.
  """
  if backend not in BACKENDS:
    raise ValueError(
        f'Unknown backend {backend!r}; known are {", ".join(BACKENDS)}.'
    )
  if jax.distributed.is_initialized() and jax.process_count() > 1:
    if backend not in ('auto', 'shard_map'):
      raise ValueError(
          f'backend={backend!r} runs in one process; a run of '
          f'{jax.process_count()} processes needs auto or shard_map.'
      )
    return 'shard_map'
  if backend != 'auto':
    return backend
  return 'map' if jax.default_backend() == 'cpu' else 'vmap'


def clients_at_once(backend: str, chunk: int | None) -> int | None:
  """How many clients a backend batches on one device; None for one by one."""
  backend = resolve_backend(backend)
  if backend == 'vmap':
    return chunk or DEFAULT_CHUNK
  return chunk if backend in ACROSS_DEVICES else None


def batched_lowering():
  """How convolutions are lowered while clients are batched."""
  return conv_lowering('gemm' if jax.default_backend() == 'cpu' else None)


def client_mesh(devices=None) -> jax.sharding.Mesh:
  """A one-axis mesh ('client') over `devices`, by default all of them."""
  devices = jax.devices() if devices is None else devices
  return jax.make_mesh(
      (len(devices),),
      ('client',),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=devices,
  )


def map_clients(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    backend: str = 'auto',
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    load: Callable[[Any, Any], Any] | None = None,
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
  """Maps `fn` over clients, adding up one of its results.

  Args:
    fn: `(shared, arg) -> (summed, kept)` for one client.
    backend: 'loop' calls a jitted `fn` client by client from Python; 'map'
      does so inside one program, running only the valid clients; 'vmap'
      batches a chunk of them; 'shard_map' and 'pmap' split them over the
      devices of `mesh`, and each device runs 'map' or, given a chunk, 'vmap'.
    chunk: Clients batched at once, which bounds memory; None means
      `DEFAULT_CHUNK` for 'vmap', and 'map' on each device for the backends
      of several devices.
    mesh: Mesh with an axis 'client' for the device backends; all devices by
      default.
    load: `(shared, args) -> [K]`, how much work each client is, by which the
      backends of several devices deal them; None for the same.

  Returns:
    `mapped(shared, args, num_valid) -> (summed, kept)`: leaves of `args` are
    [K, ...], of which the first `num_valid` (int, maybe traced) are real.
    `summed` is added over those only, and `kept` is [K, ...] with zeros for
    the others.

  Raises:
    ValueError: If the backend is unknown or the chunk is not positive.
  """
  backend = resolve_backend(backend)
  if chunk is not None and chunk < 1:
    raise ValueError(f'chunk must be at least 1, got {chunk}.')
  if backend == 'loop':
    return _python_loop(fn)
  chunk = clients_at_once(backend, chunk)
  if backend in ('map', 'vmap'):
    return _device_loop(fn, chunk)
  mesh = client_mesh() if mesh is None else mesh
  return _dealt(_device_loop(fn, chunk), backend, mesh, load)


def _zeros(shapes, leading=()):
  return jax.tree.map(
      lambda s: jnp.zeros((*leading, *s.shape), s.dtype), shapes
  )


def _shapes(fn, shared, args):
  """Result shapes of `fn` for one client of `args`."""
  one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), args)
  return jax.eval_shape(fn, shared, one)


def _python_loop(fn):
  jitted = jax.jit(fn)

  def mapped(shared, args, num_valid):
    num = jax.tree.leaves(args)[0].shape[0]
    sum_shape, kept_shape = _shapes(fn, shared, args)
    summed, kept = _zeros(sum_shape), [_zeros(kept_shape)] * num
    for i in range(int(num_valid)):
      one, kept[i] = jitted(shared, jax.tree.map(lambda a: a[i], args))  # noqa: B023
      summed = jax.tree.map(jnp.add, summed, one)
    return summed, jax.tree.map(lambda *rows: jnp.stack(rows), *kept)

  return mapped


def _device_loop(fn, chunk):
  """One client (chunk None) or one vmapped chunk after another."""

  def mapped(shared, args, num_valid):
    num = jax.tree.leaves(args)[0].shape[0]
    sum_shape, kept_shape = _shapes(fn, shared, args)
    if chunk is None and num == 1:
      # The body of a loop over one client does not depend on the index: XLA
      # would move it in front of the loop, and do its work even for nobody.
      def the_one():
        one, row = fn(shared, jax.tree.map(lambda a: a[0], args))
        return one, jax.tree.map(lambda r: r[None], row)

      return jax.lax.cond(
          jnp.asarray(num_valid) > 0,
          the_one,
          lambda: (_zeros(sum_shape), _zeros(kept_shape, (1,))),
      )
    if chunk is None:

      def body(i, carry):
        summed, kept = carry
        one, row = fn(shared, jax.tree.map(lambda a: a[i], args))
        kept = jax.tree.map(lambda a, r: a.at[i].set(r), kept, row)
        return jax.tree.map(jnp.add, summed, one), kept

      start = (_zeros(sum_shape), _zeros(kept_shape, (num,)))
      return jax.lax.fori_loop(0, num_valid, body, start)

    size = min(chunk, num)
    batched = jax.vmap(fn, in_axes=(None, 0))

    def run(begin):
      # The last chunk is moved back to fit; what it repeats is masked out.
      place = jnp.minimum(begin, num - size)
      ids = place + jnp.arange(size)
      fresh = (ids >= begin) & (ids < num_valid)
      part = jax.tree.map(
          lambda a: jax.lax.dynamic_slice_in_dim(a, place, size), args
      )
      with batched_lowering():
        many, rows = batched(shared, part)
      summed = jax.tree.map(
          lambda a: jnp.sum(_where(fresh, a, 0), 0, dtype=a.dtype), many
      )
      return place, fresh, summed, rows

    def body(i, carry):
      summed, kept = carry
      place, fresh, one, rows = run(i * size)
      kept = jax.tree.map(
          lambda a, r: jax.lax.dynamic_update_slice_in_dim(
              a,
              _where(fresh, r, jax.lax.dynamic_slice_in_dim(a, place, size)),
              place,
              0,
          ),
          kept,
          rows,
      )
      return jax.tree.map(jnp.add, summed, one), kept

    start = (_zeros(sum_shape), _zeros(kept_shape, (num,)))
    if size == num:
      return body(0, start)
    return jax.lax.fori_loop(0, -(-num_valid // size), body, start)

  return mapped


def _where(keep, new, old):
  """Selects rows: `keep` is [K] bool, `new` is [K, ...]."""
  keep = keep.reshape(keep.shape + (1,) * (new.ndim - 1))
  return jnp.where(keep, new, jnp.asarray(old, new.dtype))


def map_groups(
    fns: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]],
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[Any, Any, Any], dict[str, tuple[Any, Any]]]:
  """`map_clients` with 'shard_map' over several groups whose clients are dealt.

  No device waits for another before it has done its clients of all groups, so
  that groups too small to fill the devices run side by side.

  Args:
    fns: {group: function of one client}, as for `map_clients`.
    chunk: As for `map_clients`.
    mesh: As for `map_clients`.

  Returns:
    `mapped(shared, args, num) -> {group: (summed, kept)}`: leaves of args
    {group: args} are [D * C, ...], C places a device, of which the first
    `num` {group: [D] int32} of each device are real clients; `kept` lies so,
    too.
  """
  mesh = client_mesh() if mesh is None else mesh
  inners = {name: _device_loop(fn, chunk) for name, fn in fns.items()}
  return _across_devices(inners, 'shard_map', mesh)


def _across_devices(inners, backend, mesh):
  """Each device runs its clients of all groups, then all add up."""
  num_devices = mesh.devices.size
  by_device = jax.P('client')

  def local(shared, args, num):
    results = {
        name: inner(shared, args[name], jnp.reshape(num[name], ()))
        for name, inner in inners.items()
    }
    # All sums after all training: a sum waits for the slowest device.
    results = jax.lax.optimization_barrier(results)
    summed = jax.lax.psum({n: r[0] for n, r in results.items()}, 'client')
    return summed, {name: kept for name, (_, kept) in results.items()}

  def together(summed, kept):
    return {name: (summed[name], kept[name]) for name in inners}

  if backend == 'shard_map':
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(), by_device, by_device),
        out_specs=(jax.P(), by_device),
        check_vma=False,
    )
    return lambda shared, args, num: together(*sharded(shared, args, num))

  pmapped = jax.pmap(
      local,
      axis_name='client',
      in_axes=(None, 0, 0),
      out_axes=(None, 0),
      devices=list(mesh.devices.flat),
  )
  # After a round the state lies on the whole mesh, and what follows from it
  # too; `pmap` wants each device's share in its place.
  share = jax.sharding.NamedSharding(mesh, by_device)

  def run(shared, args, num):
    def cut(a):
      size = len(a) // num_devices
      return a.reshape(num_devices, size, *a.shape[1:])

    args, num = jax.device_put(jax.tree.map(cut, (args, num)), share)
    summed, kept = pmapped(shared, args, num)
    return together(
        summed,
        jax.tree.map(
            lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), kept
        ),
    )

  return run


def _dealt(inner, backend, mesh, load):
  """Deals one group's clients to the devices, and runs them."""
  num_devices = mesh.devices.size
  run = _across_devices({'all': inner}, backend, mesh)
  dealt = jax.jit(deal, static_argnums=2)

  def mapped(shared, args, num_valid):
    slots = jax.tree.leaves(args)[0].shape[0]
    loads = jnp.ones(slots) if load is None else load(shared, args)
    who = dealt(loads, num_valid, num_devices)
    args = jax.tree.map(lambda a: a[who.slot], args)
    summed, kept = run(shared, {'all': args}, {'all': who.num})['all']
    return summed, who.collect(kept)

  return mapped
