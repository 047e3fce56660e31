"""Rounds without training, which measure the other costs of a round."""

from collections.abc import Callable
import pathlib
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from fedjax_het.engine import cohort, mapping, placement, rounds, streaming
from fedjax_het.engine.types import FederatedAlgorithm, Uplink
from fedjax_het.models import create

MEGABYTE = 2**20
SHAPE = (8, 8, 1)
# Numbers in a client's state, which is 1 kB.
STATE_NUMBERS = 256
STORES = ('one device', 'two devices', 'host')


def without_training(numbers: int) -> FederatedAlgorithm:
  """An algorithm whose clients only count visits, in states of [numbers]."""

  def client_update(group, client, sent, data, visit):
    del group, data, visit
    return client + 1, Uplink(client + sent), {}

  def server_update(server, received, turn):
    del server, turn
    return sum(group.summed for group in received.values()), {}

  return FederatedAlgorithm(
      init=lambda key: jnp.zeros(numbers),
      init_client=lambda group, client_id, key: jnp.zeros(numbers),
      downlink=lambda server, group, visit: server,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: None,
      personal=True,
  )


def idle_rounds(
    num_clients: int, cohort_size: int, store: str
) -> tuple[Callable[[Any], Any], Any]:
  """Rounds of `without_training`.

  Args:
    num_clients: Clients of one group.
    cohort_size: Clients per round.
    store: Where their states are stored, one of `STORES`.

  Returns:
    A function `(state) -> state` that runs one round, and the first state.
  """
  model = create('mlp', SHAPE, 10, depth=2, hidden=2)
  federation, data = common.make_federation(model, num_clients, 1)
  args = without_training(STATE_NUMBERS), federation
  kwargs = dict(cohort_size=cohort_size, backend=mapping.Backend('map'))
  keys = jax.random.split(jax.random.key(0))
  if store == 'host':
    state = streaming.init_streamed_state(*args, keys[0])
    run_round = streaming.make_streamed_round(*args, **kwargs)
  elif store == 'one device':
    state = rounds.init_state(*args, keys[0])
    run_round = rounds.make_round(*args, **kwargs)
  else:
    mesh = mapping.client_mesh(jax.devices()[:2])
    kwargs['backend'] = mapping.Backend('shard_map', mesh=mesh)
    data = placement.put(data, placement.everywhere(mesh))
    state = rounds.init_state(*args, keys[0], mesh)
    run_round = rounds.make_round(*args, **kwargs)

  def call(state):
    return jax.block_until_ready(run_round(state, data, *keys))[0]

  return call, state


def _idle_case(num_clients: int, cohort_size: int, store: str):
  """Milliseconds of a round, MB of states per device, and resident MB."""
  before = _resident_bytes()
  run, state = idle_rounds(num_clients, cohort_size, store)
  state = run(state)  # Compiles.

  def call():
    nonlocal state
    state = run(state)

  seconds = _least(call)
  (states,) = jax.tree.leaves(state.clients)
  if isinstance(states, jax.Array):
    states = states.addressable_shards[0].data
  resident = _resident_bytes() - before
  return 1e3 * seconds, states.nbytes / MEGABYTE, resident / MEGABYTE


def _resident_bytes() -> int:
  """Resident memory of this process; 0 if it is unknown."""
  status = pathlib.Path('/proc/self/statm')
  if not status.is_file():
    return 0
  return int(status.read_text().split()[1]) * resource.getpagesize()


def _least(call, times: int = 10) -> float:
  """Minimum seconds of `times` calls."""
  best = float('inf')
  for _ in range(times):
    begin = time.perf_counter()
    call()
    best = min(best, time.perf_counter() - begin)
  return best


def _drawing(num_clients: int, cohort_size: int) -> float:
  """Milliseconds for drawing a cohort."""
  draw = jax.jit(cohort.sample_cohort, static_argnums=(2, 3))
  key = jax.random.key(1)

  def call():
    jax.block_until_ready(draw(key, 1, num_clients, cohort_size))

  call()
  return 1e3 * _least(call)


def outside_part(quick: bool):
  """Rows of clients, cohort, store, milliseconds and megabytes."""
  sizes, cohort_size = (10_000, 100_000, 1_000_000), 1000
  if quick:
    sizes, cohort_size = (100, 1000), 20
  rows = []
  for num in sizes:
    drawing = _drawing(num, cohort_size)
    for store in STORES:
      found, states, resident = _idle_case(num, cohort_size, store)
      devices = 2 if store == 'two devices' else 1
      computed = 4 * STATE_NUMBERS * num / devices / MEGABYTE
      rows.append([
          num, cohort_size, store, drawing, found, states, computed, resident,
      ])  # fmt: skip
  return rows
