"""The asynchronous driver follows its schedule exactly."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import asynchronous, rounds
from fedjax_het.engine.clock import Device, Fleet, plan
from fedjax_het.engine.events import round_events
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.types import FederatedAlgorithm, Uplink, Visit
from fedjax_het.engine.visits import client_key
from tests.engine.collectives import computations
from tests.tiny import tiny_data, tiny_federation

KEY = jax.random.key(1)
SPEEDS = (4.0, 1.0, 2.5, 2.0)  # Seconds per visit.


def make_fleet(seconds, **options):
  """Visits of one example, with nothing to send, that take `seconds`."""
  options = dict(latency=0.0) | options
  devices = [Device(examples_per_second=1 / s, **options) for s in seconds]
  nothing = [0] * len(devices)
  return Fleet(devices, [1] * len(devices), nothing, nothing)


def make_events(federation, schedule, cohort_size):
  return round_events(schedule, federation, cohort_size)


def first_state(algorithm, federation, data):
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  return asynchronous.init_async_state(algorithm, federation, state, data)


def run(
    algorithm,
    federation,
    data,
    events,
    through_host=False,
    key=KEY,
    **options,
):
  """Returns the state after all events, on the host, and the reports."""
  run_round = asynchronous.make_async_round(
      algorithm,
      federation,
      cohort_size=len(events[0].client),
      **dict(backend='map') | options,
  )
  state, reports = first_state(algorithm, federation, data), []
  for one in events:
    if through_host:
      state = jax.tree.map(jnp.asarray, jax.device_get(state))
    state, report = run_round(state, data, key, one)
    reports.append(jax.device_get(report))
  return jax.device_get(state), reports


def assert_close(got, want, **kwargs):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, **kwargs)


@pytest.fixture(scope='module')
def federation():
  return tiny_federation((1, 2), norm=False)


@pytest.fixture(scope='module')
def data():
  return tiny_data((6, 6, 6, 6))


@pytest.fixture(scope='module')
def stale(federation):
  """Two rounds of three uploads by clients of different speeds."""
  schedule = plan(make_fleet(SPEEDS), 6)
  assert len(set(schedule.staleness)) > 2
  return make_events(federation, schedule, 3)


@pytest.fixture(scope='module')
def reference(federation, data, stale):
  """FedAsync over those rounds, by the backend 'map'."""
  return run(ALGORITHMS['fedasync'](federation), federation, data, stale)


@pytest.mark.parametrize(
    ('name', 'options', 'others'),
    [
        ('private', {}, {}),
        ('fedasync', dict(staleness='constant'), {}),
        # Two updates with server_lr=0.5, one by one, are the clients' mean.
        (
            'fedavg',
            dict(aggregation='architecture'),
            dict(server_lr=0.5),
        ),
    ],
)
def test_equal_devices_act_as_in_synchronous_rounds(
    name, options, others, federation, data
):
  algorithm = ALGORITHMS[name](federation, **options)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  want = rounds.init_state(algorithm, federation, jax.random.key(0))
  for _ in range(2):
    want, want_report = run_round(want, data, KEY, KEY)
  events = make_events(federation, plan(make_fleet([1.0] * 4), 8), 4)
  algorithm = ALGORITHMS[name](federation, **options, **others)
  got, (_, got_report) = run(algorithm, federation, data, events)
  assert_close(got[:3], tuple(jax.device_get(want)), rtol=1e-5, atol=1e-6)
  for group in federation.groups:
    mine, theirs = got_report[group.name], want_report[group.name]
    real = mine.client_id < 4
    np.testing.assert_array_equal(mine.client_id[real], theirs.client_id)
    for name in ('metrics', 'down', 'up'):
      assert_close(
          jax.tree.map(lambda a, real=real: a[real], getattr(mine, name)),
          jax.device_get(getattr(theirs, name)),
          rtol=1e-5,
      )


@pytest.mark.parametrize('limit', [None, 1])
def test_agrees_with_a_plain_event_queue(federation, data, reference, limit):
  """Trains visits one by one, from a list of all server models so far.

  An upload that is staler than `limit` adds no model.
  """
  algorithm = ALGORITHMS['fedasync'](federation, max_staleness=limit)
  first = first_state(algorithm, federation, data)
  owner = {int(k): g for g in federation.groups for k in g.client_ids}

  def train(group):
    def one(x, client_id, key):
      down, up = (
          Visit(client_id, jnp.int32(0), k) for k in jax.random.split(key)
      )
      sent = algorithm.downlink(x, group, down)
      data_ = data.client(client_id)
      nothing = jax.tree.map(lambda a: a[0], first.clients[group.name])
      return algorithm.client_update(group, nothing, sent, data_, up)[1].kept

    return jax.jit(one)

  trainers = {group.name: train(group) for group in federation.groups}
  history, began, visits = [jax.device_get(first.server)], {}, [0] * 4
  stale = []
  queue = [(0.0, 'then download', k) for k in range(4)]  # Already a heap.
  while len(stale) < 6:
    time, what, k = heapq.heappop(queue)
    if what == 'then download':
      began[k] = len(history) - 1
      heapq.heappush(queue, (time + SPEEDS[k], 'first upload', k))
      continue
    key = client_key(KEY, visits[k], k)
    x_tau = history[began[k]]
    kept = trainers[owner[k].name](x_tau, jnp.int32(k), key)
    staleness = len(history) - 1 - began[k]
    stale.append(staleness)
    visits[k] += 1
    heapq.heappush(queue, (time, 'then download', k))
    if limit is not None and staleness > limit:
      continue
    alpha_t = 0.6 * (staleness + 1) ** -0.5
    x = jax.tree.map(lambda a: a, history[-1])
    for block, w in jax.device_get(kept.w.params).items():
      x.params[block] = jax.tree.map(
          lambda old, new, a=alpha_t: (1 - a) * old + a * new,
          x.params[block],
          w,
      )
    history.append(x)
  schedule = plan(make_fleet(SPEEDS), 6, max_staleness=algorithm.max_staleness)
  np.testing.assert_array_equal(schedule.staleness, stale)
  if limit is None:
    state, _ = reference
  else:
    assert len(history) < 7
    events = make_events(federation, schedule, 3)
    state, _ = run(algorithm, federation, data, events)
  assert_close(state.server, history[-1], rtol=1e-5, atol=1e-6)


def check_backend(federation, data, stale, reference, backend, key=KEY):
  algorithm = ALGORITHMS['fedasync'](federation)
  got, reports = run(
      algorithm, federation, data, stale, key=key, backend=backend
  )
  # Not compared: visits in flight, which no upload has used yet.
  assert_close(got[:3], reference[0][:3], rtol=1e-5, atol=1e-6)
  assert_close(reports, reference[1], rtol=1e-5, atol=1e-6)


def test_backends_agree(federation, data, stale, reference):
  check_backend(federation, data, stale, reference, Backend('vmap', 2))


@pytest.mark.slow
def test_several_devices_agree(federation, data, stale, users_generator):
  key = jax.random.key(1)
  algorithm = ALGORITHMS['fedasync'](federation)
  reference = run(algorithm, federation, data, stale, key=key)
  check_backend(
      federation, data, stale, reference, Backend('shard_map'), key
  )


@pytest.mark.slow
def test_all_collectives_are_in_one_loop(federation, data, stale):
  """Otherwise a round may never end, see `placement._blocks`."""
  algorithm = ALGORITHMS['fedasync'](federation)
  run_round = asynchronous.make_async_round(
      algorithm,
      federation,
      cohort_size=len(stale[0].client),
      backend='shard_map',
  )
  state = first_state(algorithm, federation, data)
  key = jax.random.key(1, impl='threefry2x32')
  found = computations(run_round.lower(state, data, key, stale[0]).compile())
  assert len(found) == 1


def test_resume_is_exact(federation, data, stale, reference):
  """A state that went through host memory continues bit for bit."""
  algorithm = ALGORITHMS['fedasync'](federation)
  got, _ = run(algorithm, federation, data, stale, through_host=True)
  assert_close(got, reference[0], rtol=0, atol=0)


def probe(num_uploads, broken=-1):
  """An algorithm without training for four clients; its server logs uploads.

  A client counts its visits. Client `broken` uploads NaN in its visit 1.
  """

  def client_update(group, client, sent, data, visit):
    number = visit.turn // 4
    wrong = (visit.client_id == broken) & (number == 1)
    kept = dict(
        version=sent,
        visit=number,
        round_num=visit.round_num,
        before=client,
        value=jnp.where(wrong, jnp.nan, 1.0),
    )
    metrics = dict(train_loss=jnp.float32(visit.round_num))
    return client + 1, Uplink(jnp.int32(1), kept), metrics

  def server_update(server, received, turn):
    del turn
    log, now = server
    ids = jnp.stack([r.client_id[0] for r in received.values()])
    i = jnp.argmin(ids)  # The others are padding.
    kept = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves)[i],
        *(r.kept for r in received.values()),
    )
    stale = jnp.stack([r.staleness[0] for r in received.values()])[i]
    total = sum(r.summed for r in received.values())
    row = (
        ids[i], stale, now - kept['version'], kept['visit'], kept['before'],
        total, kept['round_num'],
    )  # fmt: skip
    return (log.at[now].set(jnp.stack(row)), now + 1), {}

  return FederatedAlgorithm(
      init=lambda key: (jnp.zeros((num_uploads, 7), jnp.int32), jnp.int32(0)),
      init_client=lambda group, client_id, key: jnp.int32(0),
      downlink=lambda server, group, visit: server[1],
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client,
  )


def test_the_server_is_given_what_the_plan_says(federation, data):
  schedule = plan(
      make_fleet(SPEEDS, jitter=0.4, pause=0.5, drop_out=0.2, latency=0.1), 40
  )
  assert len(schedule.lost_client) > 3 and np.max(schedule.staleness) > 3
  events = make_events(federation, schedule, 4)
  state, reports = run(probe(40), federation, data, events)
  log, number = state.server
  assert number == 40 and state.round_num == 10
  np.testing.assert_array_equal(log[:, 0], schedule.client)
  np.testing.assert_array_equal(log[:, 1], schedule.staleness)
  # The clients downloaded the planned versions.
  np.testing.assert_array_equal(log[:, 2], schedule.staleness)
  np.testing.assert_array_equal(log[:, 3], schedule.visit)
  assert np.all(log[:, 5] == 1)  # The sums of all groups hold one upload.
  # A visit's round is that of its download, not that of its upload.
  np.testing.assert_array_equal(log[:, 6], schedule.version // 4)
  assert np.any(log[:, 6] < np.arange(40) // 4)
  # A client's state counts its visits that arrived, not the lost ones.
  for k in range(4):
    mine = log[schedule.client == k]
    np.testing.assert_array_equal(mine[:, 4], np.arange(len(mine)))
    group = next(g for g in federation.groups if k in g.client_ids)
    row = list(group.client_ids).index(k)
    assert state.clients[group.name][row] == len(mine)
  senders = np.stack([
      np.min([r.client_id for r in report.values()], axis=0)
      for report in reports
  ])
  np.testing.assert_array_equal(senders.reshape(-1), schedule.client)


def test_what_is_not_finite_is_left_out(federation, data):
  schedule = plan(make_fleet([1.0, 1.3, 1.7, 2.1]), 12)
  events = make_events(federation, schedule, 6)
  state, reports = run(probe(12, broken=2), federation, data, events)
  wrong = (schedule.client == 2) & (schedule.visit == 1)
  assert wrong.sum() == 1
  want = np.where(wrong, 4, schedule.client)  # 4 is padding.
  np.testing.assert_array_equal(state.server[0][:, 0], want)
  np.testing.assert_array_equal(state.server[0][:, 5], ~wrong)
  group = next(g for g in federation.groups if 2 in g.client_ids)
  row = list(group.client_ids).index(2)
  arrived = np.sum(schedule.client == 2)
  assert state.clients[group.name][row] == arrived - 1
  finite = np.stack([
      np.all([r.finite for r in report.values()], axis=0) for report in reports
  ])
  np.testing.assert_array_equal(finite.reshape(-1), ~wrong)


def test_every_download_is_trained_once_between_download_and_upload():
  federation = tiny_federation((1, 2, 3))
  schedule = plan(make_fleet((1, 2, 3, 4, 5, 6), jitter=0.3), 60)
  downloaded, trained = {}, {}
  for r, one in enumerate(make_events(federation, schedule, 5)):
    for turns, when in ((one.downloads, downloaded), (one.training, trained)):
      for group in federation.groups:
        row, visit, bounds = turns[group.name]
        for i in range(5):
          for j in range(bounds[i], bounds[i + 1]):
            turn = int(group.client_ids[row[j]]), int(visit[j])
            assert turn not in when
            when[turn] = 5 * r + i
    assert not np.any((one.wave == 0) & np.array([
        sum(np.diff(t.bounds)[i] for t in one.training.values())
        for i in range(5)
    ]))
  for u in range(60):
    turn = int(schedule.client[u]), int(schedule.visit[u])
    assert downloaded[turn] == schedule.version[u]
    assert downloaded[turn] <= trained[turn] <= u
  # Waves train several clients where possible.
  assert len(set(trained.values())) < 0.7 * len(trained)


def test_no_recompilation_after_the_first_round(federation, data):
  schedule = plan(make_fleet(SPEEDS, jitter=0.5, drop_out=0.1), 16)
  events = make_events(federation, schedule, 4)
  algorithm, traces = probe(16), []

  def counting(*args):
    traces.append(1)
    return algorithm.client_update(*args)

  algorithm_ = algorithm._replace(client_update=counting)
  run_round = asynchronous.make_async_round(
      algorithm_, federation, cohort_size=4, backend='map'
  )
  state, compiled = first_state(algorithm, federation, data), []
  with pytest.raises(ValueError, match=r'the classes 0\.\.2, but a label is 7'):
    run_round(state, data.replace(largest_label=7), KEY, events[0])
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, secs, **kw: compiled.append(event)
      if 'backend_compile' in event
      else None
  )
  try:
    for i, one in enumerate(events):
      state, _ = run_round(state, data, KEY, one)
      if i == 0:
        first = len(traces)
        compiled.clear()
  finally:
    jax.monitoring.clear_event_listeners()
  assert len(events) == 4 and len(traces) == first and not compiled


@pytest.mark.slow  # `tests/algorithms/test_clocks.py` tests one group.
@pytest.mark.parametrize('name', ALGORITHMS)
def test_every_algorithm_keeps_its_shapes(name):
  from tests.algorithms.suite import NUM_PUBLIC, make

  algorithm, federation = make(name)
  data = tiny_data(public=NUM_PUBLIC)
  (events,) = make_events(federation, plan(make_fleet([1.0] * 6), 4), 4)
  run_round = asynchronous.make_async_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  before = jax.eval_shape(lambda: first_state(algorithm, federation, data))
  after, reports = jax.eval_shape(run_round, before, data, KEY, events)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
      lambda x: (x.shape, x.dtype), after
  )
  assert all(r.client_id.shape == (4,) for r in reports.values())


@pytest.mark.parametrize('backend', ['loop', 'pmap'])
def test_backends_that_run_from_python_are_refused(federation, backend):
  with pytest.raises(ValueError, match='cannot run asynchronous rounds; use a'):
    asynchronous.make_async_round(
        probe(1), federation, cohort_size=1, backend=backend
    )
