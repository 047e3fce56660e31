"""Runs with oneDNN are close to XLA's, resume exactly and are not cached."""

import jax
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.experiment import tuned
from fedjax_het.kernels import onednn
from tests.experiment.test_form import table
from tests.experiment.tiny_runs import tiny_config, without_seconds

pytestmark = [
    pytest.mark.usefixtures('undrawn'),
    pytest.mark.skipif(
        onednn.why_not() is not None, reason=str(onednn.why_not())
    ),
]


def config(conv_backend, **changes):
  made = tiny_config('fedavg', conv_backend=conv_backend, **changes)
  made.num_rounds, made.checkpoint_every, made.cohort_size = 2, 1, 3
  made.groups = dict(dropout_cnn=3)
  made.model = dict(width=1 / 8)
  # Adam would amplify rounding to a whole step.
  made.local.optimizer, made.local.learning_rate = 'sgd', 0.05
  return made


def test_a_run_is_near_to_one_of_xla_and_resumes_exactly(tmp_path):
  """Nothing is stored in a cache that the user has chosen."""
  stored, folder = tmp_path / 'stored', jax.config.jax_compilation_cache_dir
  stored.mkdir()
  jax.config.update('jax_compilation_cache_dir', str(stored))
  try:
    own = experiment.run(
        config('onednn', compilation_cache=True), tmp_path / 'own'
    )
    assert jax.config.jax_compilation_cache_dir == str(stored)
  finally:
    jax.config.update('jax_compilation_cache_dir', folder)
  assert not list(stored.iterdir())
  xla = experiment.run(config('xla'), tmp_path / 'xla')
  for got, want in zip(own.rows, xla.rows, strict=True):
    np.testing.assert_allclose(got['loss'], want['loss'], rtol=1e-3)

  rows, resumed = [], tmp_path / 'resumed'
  experiment.run(
      config('onednn'), resumed, observe=rows.append, stop=lambda: bool(rows)
  )
  assert len(without_seconds(resumed / 'metrics.jsonl')) < len(own.rows)
  experiment.run(config('onednn'), resumed)
  assert without_seconds(resumed / 'metrics.jsonl') == without_seconds(
      tmp_path / 'own' / 'metrics.jsonl'
  )


@pytest.mark.slow
def test_auto_takes_it_where_it_was_measured_to_be_faster(
    tmp_path, monkeypatch
):
  """The run equals one that asks for oneDNN by name, also with a cache."""
  monkeypatch.setenv('FEDJAX_HET_TUNED', str(tmp_path / 'tuned'))
  slow = table(convolutions=(1e-4, 1e-4, 1e-2, 1e-4))
  tuned.write(slow._replace(devices=1))
  folder = jax.config.jax_compilation_cache_dir
  auto = experiment.run(
      config('auto', compilation_cache=True), tmp_path / 'auto'
  )
  assert jax.config.jax_compilation_cache_dir == folder
  assert auto.facts['form']['conv_backend'] == 'onednn'
  experiment.run(config('onednn'), tmp_path / 'named')
  assert without_seconds(tmp_path / 'auto' / 'metrics.jsonl') == (
      without_seconds(tmp_path / 'named' / 'metrics.jsonl')
  )


def test_it_is_refused_before_anything_is_read(tmp_path, monkeypatch):
  monkeypatch.setattr(onednn, 'TESTED', ('0.0.1',))
  with pytest.raises(ValueError, match=r"'onednn' is not possible.*0\.0\.1"):
    experiment.run(config('onednn'), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
