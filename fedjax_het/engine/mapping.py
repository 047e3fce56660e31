"""Backends: how a function written for one client is run over many.

All backends give a function `mapped(shared, args, num_valid)`, and their
results agree up to the rounding of sums. The backend is chosen outside the
algorithm.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.engine.balance import assign
from fedjax_het.engine.rows import put_row, take_row
from fedjax_het.kernels.auto import auto_choice
from fedjax_het.kernels.lowering import conv_lowering
from fedjax_het.names import check_name
from fedjax_het.options import at_least

BACKENDS = ('auto', 'loop', 'map', 'vmap', 'shard_map', 'pmap')
# Backends that can be part of a larger compiled program.
TRACEABLE = ('map', 'vmap', 'shard_map')
ACROSS_DEVICES = ('shard_map', 'pmap')


@dataclasses.dataclass(frozen=True)
class Backend:
  """How clients are mapped; `Backend.of` returns the one that will run.

  Attributes:
    kind: One of `BACKENDS`. 'loop' calls a jitted function client by client
      from Python. 'map' does so inside one program, and runs only the valid
      clients. 'vmap' batches a chunk of clients. 'shard_map' and 'pmap' split
      the clients over the devices of `mesh`; each device runs 'map' or, with a
      chunk, 'vmap'. 'auto' is resolved by `resolve_backend`.
    chunk: Clients in a batch, which bounds memory. With None `kernels.auto`
      chooses it for 'vmap', and the devices of 'shard_map' and 'pmap' run one
      client at a time. 'loop' and 'map' ignore it.
    mesh: Mesh with one axis 'client', for 'shard_map' and 'pmap'; None for all
      devices. The other backends ignore it.

  Raises:
    ValueError: If the kind is unknown or the chunk is below 1.
  """

  kind: str = 'auto'
  chunk: int | None = None
  mesh: jax.sharding.Mesh | None = None

  def __post_init__(self):
    check_name('backend', self.kind, BACKENDS)
    if self.chunk is not None:
      at_least(1, chunk=self.chunk)

  @classmethod
  def of(cls, backend: 'str | Backend') -> 'Backend':
    """The backend that will run: 'auto' resolved, the default mesh filled in.

    Args:
      backend: A name of `BACKENDS`, or a backend.

    Returns:
      A backend whose `kind` is not 'auto'.

    Raises:
      ValueError: See `Backend` and `resolve_backend`.
    """
    if not isinstance(backend, Backend):
      backend = cls(backend)
    kind, mesh = resolve_backend(backend.kind), backend.mesh
    if mesh is None and kind in ACROSS_DEVICES:
      mesh = client_mesh()
    return dataclasses.replace(backend, kind=kind, mesh=mesh)

  @property
  def traceable(self) -> bool:
    """Whether it can be part of a larger compiled program."""
    return self.kind in TRACEABLE

  @property
  def at_once(self) -> int | None:
    """Clients in a batch on one device; None for one client at a time."""
    if self.kind == 'vmap':
      return self.chunk or auto_choice().chunk
    return self.chunk if self.kind in ACROSS_DEVICES else None

  @property
  def state_mesh(self) -> jax.sharding.Mesh | None:
    """Mesh over which a run's state is sharded; None for the default device."""
    return self.mesh if self.kind == 'shard_map' else None


def resolve_backend(kind: str) -> str:
  """Replaces 'auto' by the backend that will run.

  `kernels.auto` chooses it for each kind of device. On a CPU this is 'map':
  under 'vmap' convolutions become grouped ones, which are slow there. With
  several processes it is always 'shard_map'.

  Args:
    kind: One of `BACKENDS`.

  Returns:
    One of `BACKENDS` other than 'auto'.

  Raises:
    ValueError: If the name is unknown, or several processes cannot run it.
  """
  kind = Backend(kind).kind
  if jax.distributed.is_initialized() and jax.process_count() > 1:
    if kind not in ('auto', 'shard_map'):
      raise ValueError(
          f'backend={kind!r} runs in one process; a run of '
          f'{jax.process_count()} processes needs auto or shard_map.'
      )
    return 'shard_map'
  if kind != 'auto':
    return kind
  return auto_choice().backend


def batched_lowering():
  """How convolutions are lowered while clients are batched."""
  return conv_lowering(auto_choice().batched_lowering)


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
    backend: str | Backend = 'auto',
    *,
    load: Callable[[Any, Any], Any] | None = None,
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
  """Maps `fn` over clients, and sums one of its two results.

  Args:
    fn: `(shared, arg) -> (summed, kept)` for one client.
    backend: How clients are mapped: a `Backend`, or the name of one.
    load: `(shared, args) -> [K]`, the work of each client in any unit, by which
      clients are assigned to devices; None if all have the same work.

  Returns:
    `mapped(shared, args, num_valid) -> (summed, kept)`: leaves of `args` are
    [K, ...], of which the first `num_valid` (int, maybe traced) are real.
    `summed` is the sum over the real clients, and `kept` is [K, ...] with zeros
    for the others.

  Raises:
    ValueError: See `Backend.of`.
  """
  backend = Backend.of(backend)
  if backend.kind == 'loop':
    return _python_loop(fn)
  on_device = _device_loop(fn, backend.at_once)
  if backend.kind in ACROSS_DEVICES:
    return _assigned(on_device, backend, load)
  return on_device


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
  """Runs clients one by one (chunk None) or in vmapped chunks."""
  return _one_by_one(fn) if chunk is None else _by_chunk(fn, chunk)


def _one_by_one(fn):
  """One client after another, the valid ones only."""

  def mapped(shared, args, num_valid):
    num = jax.tree.leaves(args)[0].shape[0]
    sum_shape, kept_shape = _shapes(fn, shared, args)

    def nothing():
      return _zeros(sum_shape), _zeros(kept_shape, (num,))

    def the_one():
      one, row = fn(shared, jax.tree.map(lambda a: a[0], args))
      return one, jax.tree.map(lambda r: r[None], row)

    def body(i, carry):
      summed, kept = carry
      one, row = fn(shared, take_row(args, i))
      return jax.tree.map(jnp.add, summed, one), put_row(kept, i, row)

    if num == 1:
      # A loop body over one client does not depend on the index: XLA would
      # hoist it out of the loop, and run it even without a valid client.
      return jax.lax.cond(jnp.asarray(num_valid) > 0, the_one, nothing)
    return jax.lax.fori_loop(0, num_valid, body, nothing())

  return mapped


def _by_chunk(fn, chunk: int):
  """One vmapped chunk of clients after another."""

  def mapped(shared, args, num_valid):
    num = jax.tree.leaves(args)[0].shape[0]
    sum_shape, kept_shape = _shapes(fn, shared, args)
    size = min(chunk, num)
    batched = jax.vmap(fn, in_axes=(None, 0))

    def run(begin):
      # The last chunk is moved back to fit; repeated clients are masked out.
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
    backend: Backend,
) -> Callable[[Any, Any, Any], dict[str, tuple[Any, Any]]]:
  """`map_clients` by 'shard_map' over several groups in one program.

  Each device runs its clients of all groups before any sum is taken, so that
  groups with fewer clients than devices run side by side.

  Args:
    fns: {group: function of one client}, as for `map_clients`.
    backend: Of kind 'shard_map', as `Backend.of` gives it.

  Returns:
    `mapped(shared, args, num) -> {group: (summed, kept)}`. Leaves of args
    {group: args} are [D * C, ...], C places on each of D devices; the first
    `num` {group: [D] int32} places of each device hold real clients. Leaves of
    `kept` are [D * C, ...], too.
  """
  inners = {
      name: _device_loop(fn, backend.at_once) for name, fn in fns.items()
  }
  return _across_devices(inners, backend)


def _across_devices(inners, backend: Backend):
  """Each device runs its clients of all groups; then the sums are added."""
  by_device = jax.P('client')

  def local(shared, args, num):
    results = {
        name: inner(shared, args[name], jnp.reshape(num[name], ()))
        for name, inner in inners.items()
    }
    # Train everything before any sum, which waits for the slowest device.
    results = jax.lax.optimization_barrier(results)
    summed = jax.lax.psum({n: r[0] for n, r in results.items()}, 'client')
    return summed, {name: kept for name, (_, kept) in results.items()}

  def by_group(summed, kept):
    return {name: (summed[name], kept[name]) for name in inners}

  if backend.kind == 'pmap':
    run = _pmapped(local, backend.mesh)
  else:
    run = jax.shard_map(
        local,
        mesh=backend.mesh,
        in_specs=(jax.P(), by_device, by_device),
        out_specs=(jax.P(), by_device),
        check_vma=False,
    )
  return lambda shared, args, num: by_group(*run(shared, args, num))


def _pmapped(local, mesh):
  """`local` over the devices of a mesh by `jax.pmap`, on flat arrays."""
  num_devices = mesh.devices.size
  pmapped = jax.pmap(
      local,
      axis_name='client',
      in_axes=(None, 0, 0),
      out_axes=(None, 0),
      devices=list(mesh.devices.flat),
  )
  # `pmap` needs each device's part on that device; after a round, arrays that
  # are computed from the state are on the whole mesh.
  by_device = jax.sharding.NamedSharding(mesh, jax.P('client'))

  def cut(a):
    size = len(a) // num_devices
    return a.reshape(num_devices, size, *a.shape[1:])

  def join(a):
    return a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])

  def run(shared, args, num):
    args, num = jax.device_put(jax.tree.map(cut, (args, num)), by_device)
    summed, kept = pmapped(shared, args, num)
    return summed, jax.tree.map(join, kept)

  return run


def _assigned(inner, backend: Backend, load):
  """Assigns one group's clients to devices, and runs them there."""
  num_devices = backend.mesh.devices.size
  run = _across_devices({'all': inner}, backend)

  @jax.jit
  def place(loads, num_valid):
    who = assign(loads, num_valid, num_devices)
    if backend.kind == 'pmap':
      return who
    # Otherwise XLA may divide the assignment's loop among the devices.
    everywhere = jax.sharding.NamedSharding(backend.mesh, jax.P())
    return jax.lax.with_sharding_constraint(who, everywhere)

  def mapped(shared, args, num_valid):
    slots = jax.tree.leaves(args)[0].shape[0]
    loads = jnp.ones(slots) if load is None else load(shared, args)
    who = place(loads, num_valid)
    args = jax.tree.map(lambda a: a[who.slot], args)
    summed, kept = run(shared, {'all': args}, {'all': who.num})['all']
    return summed, who.collect(kept)

  return mapped
