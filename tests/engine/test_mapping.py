"""All backends run the same clients, sum the same, and skip the padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine import mapping

CASES = [
    ('loop', None),
    ('map', None),
    ('vmap', None),
    ('vmap', 2),
    ('vmap', 3),
    ('shard_map', None),
    ('shard_map', 2),
    ('pmap', None),
]


def visit(shared, arg):
  """A ragged loop: client i adds `shared` to its state `i` times."""
  state, steps = arg

  def body(i, carry):
    total, count = carry
    return total + shared * (i + 1), count + 1

  total, count = jax.lax.fori_loop(0, steps, body, (state, jnp.int32(0)))
  return {'sum': total, 'steps': count}, (total, count)


def expected(states, steps, num_valid):
  totals = [s + 0.5 * n * (n + 1) / 2 for s, n in zip(states, steps)]
  return np.array(totals[:num_valid]), np.array(steps[:num_valid])


def compiled(fn, backend, chunk):
  mapped = mapping.map_clients(fn, mapping.Backend(backend, chunk))
  return jax.jit(mapped) if backend in mapping.TRACEABLE else mapped


@functools.cache
def mapped_visit(backend, chunk):
  """One program for all numbers of clients."""
  return compiled(visit, backend, chunk)


@pytest.mark.parametrize('backend,chunk', CASES)
@pytest.mark.parametrize('num_valid', [0, 1, 5, 7])
def test_closed_form(backend, chunk, num_valid):
  states = np.arange(7, dtype=np.float32)
  steps = np.array([3, 0, 2, 5, 1, 4, 2], np.int32)
  summed, (totals, counts) = jax.device_get(
      mapped_visit(backend, chunk)(
          jnp.float32(0.5), jax.device_put((states, steps)), num_valid
      )
  )
  want_totals, want_steps = expected(states, steps, num_valid)
  np.testing.assert_allclose(summed['sum'], want_totals.sum(), rtol=1e-6)
  assert int(summed['steps']) == want_steps.sum()
  np.testing.assert_allclose(totals[:num_valid], want_totals, rtol=1e-6)
  np.testing.assert_array_equal(counts[:num_valid], want_steps)
  assert not np.any(totals[num_valid:])
  assert not np.any(counts[num_valid:])


def test_padding_is_never_run_by_map():
  """A padding slot, which would divide by zero, does not run."""

  def fn(shared, arg):
    return shared / arg, ()

  mapped = jax.jit(mapping.map_clients(fn, 'map'))
  summed, _ = mapped(1.0, jnp.array([2.0, 4.0, 0.0]), 2)
  assert float(summed) == 0.75


@pytest.mark.parametrize('backend,chunk', CASES)
def test_parts_without_entries(backend, chunk):
  """Empty trees and arrays of size 0 pass through."""

  def fn(shared, arg):
    del shared
    return (), (arg, jnp.zeros((0,)))

  mapped = compiled(fn, backend, chunk)
  summed, (same, empty) = mapped((), jnp.arange(6.0), 6)
  assert summed == ()
  np.testing.assert_array_equal(same, np.arange(6.0))
  assert empty.shape == (6, 0)


@pytest.mark.usefixtures('optimised')
def test_memory_does_not_grow_with_the_cohort():
  """1,000 clients need no more temporary memory than 10."""

  def fn(shared, arg):
    return jnp.outer(shared, shared) * arg, ()

  def temporaries(num):
    mapped = jax.jit(mapping.map_clients(fn, 'map'))
    compiled = mapped.lower(jnp.ones(64), jnp.ones(num), num).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(1000) <= 1.1 * temporaries(10)


def test_unknown_backend_is_named():
  with pytest.raises(ValueError, match="Unknown backend 'vmpa'; did you mean"):
    mapping.map_clients(visit, 'vmpa')
  with pytest.raises(ValueError, match='chunk must be at least 1, got 0'):
    mapping.Backend('vmap', chunk=0)


@pytest.mark.parametrize('num', [1, 2])
def test_no_client_no_work(optimised, num):
  """XLA must not move the work of a single client out of the loop."""

  def fn(shared, x):
    return jnp.sum(x), jnp.sort(x * shared)

  mapped = jax.jit(mapping.map_clients(fn, 'map'))
  args = jnp.arange(7.0 * num).reshape(num, 7)
  program = mapped.lower(2.0, args, jnp.int32(0)).compile().as_text()
  assert 'sort(' in program
  assert 'sort(' not in program[program.index('ENTRY') :]
  for valid in range(num + 1):
    summed, kept = mapped(-1.0, args, valid)
    assert summed == jnp.sum(args[:valid])
    want = jnp.where(jnp.arange(num)[:, None] < valid, -args[:, ::-1], 0)
    np.testing.assert_array_equal(kept, want)
