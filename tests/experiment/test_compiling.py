"""The rounds are compiled while the first state is evaluated."""

from concurrent import futures
import threading

import jax
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.engine import compiling, drivers
from tests.experiment.tiny_runs import tiny_config, without_seconds

pytestmark = pytest.mark.usefixtures('undrawn')


class _Lowered:
  """A program whose compilation waits for `ready`, or raises `error`."""

  def __init__(self, lowered=None, ready=None, error=None):
    self.lowered, self.ready, self.error = lowered, ready, error

  def compile(self):
    if self.error is not None:
      raise self.error
    assert self.ready.wait(60)
    return self.lowered.compile()


def _config():
  config = tiny_config(num_rounds=1)
  config.groups.large.depth = 2  # One shape: less to compile.
  return config


@pytest.mark.slow
def test_the_first_evaluation_does_not_wait(tmp_path, monkeypatch):
  """Nothing is compiled twice, and results are those without a thread."""

  def now(lowered):
    done = futures.Future()
    done.set_result(compiling.Compiled(lowered.compile(), 3.0))
    return done

  monkeypatch.setattr(drivers, 'in_thread', now)
  want = experiment.run(_config(), tmp_path / 'now')

  evaluated, compiled = threading.Event(), []
  monkeypatch.setattr(
      drivers,
      'in_thread',
      lambda lowered: compiling.in_thread(_Lowered(lowered, evaluated)),
  )

  def hear(event, seconds, **kwargs):
    if event.endswith('backend_compile_duration'):
      compiled.append(kwargs['fun_name'])

  jax.monitoring.register_event_duration_secs_listener(hear)
  try:
    got = experiment.run(
        _config(), tmp_path / 'thread', observe=lambda row: evaluated.set()
    )
  finally:
    jax.monitoring.unregister_event_duration_listener(hear)
  # One evaluation, since the groups share a model, before and after the round.
  names = [name for name in compiled if name in ('jit(run)', 'jit(run_round)')]
  assert names == ['jit(run)', 'jit(run_round)']
  rows = [
      without_seconds(result.workdir / 'metrics.jsonl')
      for result in (got, want)
  ]
  assert rows[0] == rows[1]
  for a, b in zip(jax.tree.leaves(got.state), jax.tree.leaves(want.state)):
    np.testing.assert_array_equal(a, b)
  assert got.facts['program_memory'] == want.facts['program_memory'] != {}
  # Of tracing, and then of compiling.
  assert (seconds := want.facts['compile_seconds']) > 3
  assert got.facts['compile_seconds'] > 0
  text = (want.workdir / 'report.md').read_text()
  assert f'from the cache, took {seconds:.1f} s' in text


def test_an_error_of_the_compilation_ends_the_run(tmp_path, monkeypatch):
  error = ValueError('The round cannot be compiled.')
  monkeypatch.setattr(
      drivers,
      'in_thread',
      lambda lowered: compiling.in_thread(_Lowered(error=error)),
  )
  with pytest.raises(ValueError, match=r'^The round cannot be compiled\.$'):
    experiment.run(_config(), tmp_path / 'w')
  rows = without_seconds(tmp_path / 'w' / 'metrics.jsonl')
  assert [(row['round'], row['split']) for row in rows] == [(0, 'test')]
