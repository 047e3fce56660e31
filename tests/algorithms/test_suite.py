"""What every registered algorithm must satisfy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.federated import NO_LABEL
from fedjax_het.engine import rounds
from fedjax_het.engine.client_flops import visit_flops
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Visit
from tests.algorithms.suite import NUM_PUBLIC, cases, make, needed_federation
from tests.tiny import tiny_data, tiny_local

COHORT = 4
KEYS = (jax.random.key(1), jax.random.key(2))


def federate(name, norm=False):
  """The federation of a method; with norms it trains by SGD.

  After a norm a small batch has gradients that are only rounding errors, which
  Adam would scale up.
  """
  fields = dict(local=tiny_local(optax.sgd, 0.1)) if norm else {}
  return needed_federation(name, norm, **fields)


@functools.cache
def made(name):
  """The method and its federation, made once for all tests."""
  return make(name, federate(name))


@functools.cache
def mapped_round(name):
  """The round of the backend 'map', traced once for all tests."""
  return rounds.make_round(*made(name), cohort_size=COHORT, backend='map')


@functools.cache
def host_state(name):
  """The state before the first round, on the host."""
  return jax.device_get(rounds.init_state(*made(name), jax.random.key(0)))


def first_state(name):
  """The same on the device; a round donates its buffers."""
  return jax.device_put(host_state(name), may_alias=False)


@functools.cache
def public_data():
  return tiny_data(public=NUM_PUBLIC)


def two_rounds(run_round, state, keys=KEYS, data=None):
  """The state after two rounds, on the host."""
  for _ in range(2):
    state, _ = run_round(state, data or public_data(), *keys)
  return jax.device_get(state)


def run(name, backend, federation=None):
  """The state after two rounds of another program, on the host.

  With keys of the generator that is active, see `users_generator`.
  """
  algorithm, federation = make(name, federation or federate(name))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=COHORT, backend=backend
  )
  first, *keys = map(jax.random.key, range(3))
  state = rounds.init_state(algorithm, federation, first)
  return two_rounds(run_round, state, keys)


@functools.cache
def mapped(name):
  """What `run` gives with the users' generator and the backend 'map'."""
  return run(name, 'map')


@pytest.fixture(scope='module', params=sorted(ALGORITHMS))
def name(request):
  return request.param


@pytest.fixture(scope='module')
def reference(name):
  """The state after two rounds of the backend 'map'."""
  return two_rounds(mapped_round(name), first_state(name))


def assert_close(got, want, **kwargs):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, **kwargs)


def _describe(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_a_change_of_outputs_is_given_the_mask_of_its_batch(name):
  shapes = set()

  def before_loss(outputs, labels, mask):
    shapes.add((outputs.shape[:1], labels.shape, mask.shape))
    return outputs

  task = CLASSIFICATION._replace(before_loss=before_loss)
  local = tiny_local(optax.sgd, 0.1, task=task)
  federation = needed_federation(name, local=local)
  run_round = rounds.make_round(
      *make(name, federation), cohort_size=COHORT, backend='map'
  )
  state = first_state(name)
  jax.eval_shape(run_round, state, public_data(), *KEYS)
  assert shapes
  assert all(len(set(examples)) == 1 for examples in shapes)


def test_a_round_keeps_structure_shapes_and_dtypes(name):
  _, federation = made(name)
  before = first_state(name)
  after, reports = jax.eval_shape(
      mapped_round(name), before, public_data(), *KEYS
  )
  assert _describe(before) == _describe(after)
  assert set(reports) == {group.name for group in federation.groups}
  assert all('train_loss' in r.metrics for r in reports.values())


def test_the_operations_of_a_visit_are_known(name):
  """Devices may have a speed in operations."""
  algorithm, federation = made(name)
  for group in federation.groups:
    assert min(visit_flops(algorithm, group, public_data())) > 0


def _first_model(algorithm, state, group):
  client = jax.tree.map(lambda leaf: leaf[0], state.clients[group.name])
  return jax.tree.leaves(algorithm.client_model(state.server, client, group))


def test_training_changes_the_models_and_keeps_them_finite(name, reference):
  algorithm, federation = made(name)
  for group in federation.groups:
    before = _first_model(algorithm, host_state(name), group)
    after = _first_model(algorithm, reference, group)
    assert all(np.all(np.isfinite(leaf)) for leaf in after)
    if group.name == 'tiny1':
      assert any(np.any(a != b) for a, b in zip(before, after))


@pytest.mark.slow
@pytest.mark.usefixtures('users_generator')
@pytest.mark.parametrize(
    'backend', [Backend('loop'), Backend('shard_map', 2)], ids=lambda b: b.kind
)
def test_backends_agree_and_the_order_of_groups_does_not_matter(name, backend):
  """A client's keys follow from its id, not from its group's position."""
  federation = federate(name)
  federation = dataclasses.replace(federation, groups=federation.groups[::-1])
  got = run(name, backend, federation)
  assert_close(got, mapped(name), rtol=1e-5, atol=1e-6)


def test_no_recompilation_after_the_first_round(name, reference):
  """The numbers of clients per group differ; the program does not."""
  _, federation = made(name)
  run_round = mapped_round(name)  # `reference` has compiled it.
  data, state = public_data(), first_state(name)
  events, shares = [], set()
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, secs, **kw: events.append(event)
  )
  try:
    for _ in range(4):
      state, reports = run_round(state, data, *KEYS)
      shares.add(
          tuple(
              int(np.sum(np.asarray(r.client_id) < federation.num_clients))
              for r in reports.values()
          )
      )
    found = [event for event in events if '/compile/' in event]
    jax.jit(lambda x: x + len(events))(1.0)  # Compilations are reported.
    control = [event for event in events if '/compile/' in event]
  finally:
    jax.monitoring.clear_event_listeners()
  assert len(shares) > 1
  assert not found
  assert control


def test_no_transfer_between_host_and_device_in_a_round(name, reference):
  run_round = mapped_round(name)
  data, state = public_data(), first_state(name)
  with jax.transfer_guard('disallow'):
    for _ in range(2):
      state, _ = run_round(state, data, *KEYS)
    with pytest.raises(Exception, match='Disallowed'):
      run_round(state._replace(round_num=np.int32(2)), data, *KEYS)


def test_resume_is_exact(name, reference):
  """A state that went through host memory continues bit for bit."""
  run_round = mapped_round(name)
  state, _ = run_round(first_state(name), public_data(), *KEYS)
  state = jax.device_put(jax.device_get(state), may_alias=False)
  state, _ = run_round(state, public_data(), *KEYS)
  assert_close(jax.device_get(state), reference, rtol=0, atol=0)


def test_keys_rule_the_run(name, reference):
  """Another training key gives another result."""
  keys = jax.random.key(7), KEYS[1]
  other = two_rounds(mapped_round(name), first_state(name), keys=keys)
  pairs = zip(jax.tree.leaves(other), jax.tree.leaves(reference))
  assert any(np.any(a != b) for a, b in pairs)


@pytest.mark.parametrize(
    'name',
    [name for name in sorted(ALGORITHMS) if needs_of(ALGORITHMS[name]).public],
)
def test_only_declared_labels_of_the_public_set_are_read(name):
  """Of a public set that is 'unlabelled', no label changes any result."""
  data = public_data()
  hidden, permuted = (
      data.replace(labels=data.labels.at[data.public].set(labels))
      for labels in (NO_LABEL, data.labels[data.public[::-1]])
  )
  assert np.any(permuted.labels != data.labels)
  one, *others = (
      two_rounds(mapped_round(name), first_state(name), data=table)
      for table in (data, hidden, permuted)
  )
  reads = needs_of(ALGORITHMS[name]).public == 'labelled'
  for other in others:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert any(np.any(a != b) for a, b in pairs) == reads


@pytest.mark.parametrize(
    ('name', 'case'),
    [
        pytest.param(
            name,
            case,
            id=f'{name}-{number}',
            marks=[pytest.mark.slow] if number else [],
        )
        for name in sorted(ALGORITHMS)
        for number, case in enumerate(cases(name))
    ],
)
def test_neither_padding_nor_a_batch_of_clients_changes_anything(name, case):
  """Neither a table's length nor the values in its padding matter.

  The models have norm layers, batches are partial, and noise is scaled to the
  features. The two clients of a batch differ only in their padding.
  """
  algorithm, federation = make(name, federate(name, norm=True), case)
  group = federation.groups[1]
  data = tiny_data((5, 6, 3, 7, 8, 6), public=NUM_PUBLIC)
  sizes, index = jax.device_get((data.sizes, data.index))
  strange = (np.arange(index.shape[1] + 5)[None] * 3) % len(data.labels)
  inside = np.arange(strange.shape[1])[None] < sizes[:, None]
  longer = np.pad(index, ((0, 0), (0, 5)))
  padded = np.where(inside, longer, strange).astype(index.dtype)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 1, jax.random.key(0))
  visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(4))

  def update(index, client, visit):
    sent = algorithm.downlink(server, group, visit)
    table = data.replace(index=index)
    return algorithm.client_update(group, client, sent, table.client(1), visit)

  want = jax.jit(update)(data.index, client, visit)

  @jax.jit
  def updates(indices, *one):
    two = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), one)
    return jax.vmap(update)(indices, *two)

  got = jax.device_get(updates(np.stack([longer, padded]), client, visit))
  for i in range(2):
    assert_close(
        jax.tree.map(lambda leaf, i=i: leaf[i], got),
        want,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.slow
@pytest.mark.usefixtures('users_generator')
@pytest.mark.parametrize('backend,chunk', [('shard_map', 2), ('pmap', None)])
def test_fedin_on_several_devices(backend, chunk):
  got = run('fedin', Backend(backend, chunk))
  assert_close(got, mapped('fedin'), rtol=1e-5, atol=1e-6)
