"""The memory of a visit is the largest sum of its live arrays."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_het.algorithms import fedavg
from fedjax_het.engine.client_memory import client_memory, peak_bytes
from fedjax_het.engine.types import Uplink
from tests.engine.test_asynchronous import probe
from tests.tiny import tiny_data, tiny_federation

SIZE = 4 * 100
X = jax.ShapeDtypeStruct((100,), jnp.float32)


def peak(fn):
  return peak_bytes(jax.make_jaxpr(fn)(X).jaxpr)


def test_an_array_lives_until_its_last_reader():
  # The chain holds an array and its successor, never all three.
  assert peak(lambda x: jnp.exp(jnp.sin(jnp.cos(x)))) == 2 * SIZE

  def kept(x):
    y = jnp.cos(x)
    return y * jnp.exp(jnp.sin(y))  # y lives to the end.

  assert peak(kept) == 3 * SIZE


def test_what_a_loop_makes_is_there_once():
  def body(i, x):
    return jnp.exp(jnp.sin(jnp.cos(x)))

  once = peak(lambda x: jax.lax.fori_loop(0, 2, body, x))
  assert once == peak(lambda x: jax.lax.fori_loop(0, 9, body, x))
  assert 2 * SIZE <= once <= 3 * SIZE


def test_what_a_scan_stacks_is_there_beside_its_body():
  def body(x, _):
    y = jnp.sin(x)
    return x, jnp.cos(y) + y  # Three arrays at once, one of them the row.

  assert peak(lambda x: jax.lax.scan(body, x, length=4)) >= (4 + 2) * SIZE


def test_deeper_models_and_larger_batches_take_more():
  data = tiny_data((5, 8, 3, 7))

  def found(batch_size=4):
    federation = tiny_federation((1, 3), norm=False)
    local = federation.local
    local = dataclasses.replace(local, batch_size=batch_size)
    federation = dataclasses.replace(federation, local=local)
    return client_memory(fedavg(federation), federation, data)

  small, large = found(), found(64)
  assert small['tiny1'] < small['tiny3'] and large['tiny1'] > small['tiny1']


def test_the_clients_state_and_its_download_are_added():
  federation, data = tiny_federation((1,)), tiny_data((5, 8))

  def found(state, download):
    algorithm = probe(1)._replace(
        init_client=lambda group, client_id, key: jnp.zeros(state),
        downlink=lambda server, group, visit: jnp.zeros(download),
        client_update=lambda group, client, sent, data, visit: (
            client, Uplink(()), {}
        ),
    )  # fmt: skip
    return client_memory(algorithm, federation, data)['tiny1']

  visit = found(0, 0)
  assert found(100, 0) - visit == 400 and found(0, 50) - visit == 200
  assert found(100, 50) - visit == 600
