"""The library as `launch.train` runs it: a program of `rows.programs`."""

import json
import math
import os
import pathlib
import shutil
import tempfile

import jax
import ml_collections

from benchmarks.peers import meter
from fedjax_het import experiment
from fedjax_het.experiment import form
from fedjax_het.experiment.config import default_config


def config_of(task) -> ml_collections.ConfigDict:
  """The config of a task; all other entries have their defaults."""
  config = default_config(task.algorithm)
  config.dataset, config.data_file = 'npz', task.data
  config.partition = ml_collections.ConfigDict(
      dict(name='file', seed=0, file=task.parts)
  )
  clients = task.clients // len(task.models)
  config.groups = ml_collections.ConfigDict({
      name.rpartition(':')[2]: dict(model=name, clients=clients)
      for name in task.models
  })
  config.model = ml_collections.ConfigDict(dict(width=task.width))
  config.local.update(task.local)
  config.cohort_size = task.cohort
  config.num_rounds = task.max_rounds
  # Nothing is evaluated or stored between rounds.
  config.eval_every = config.checkpoint_every = task.max_rounds
  config.update(task.overrides)
  return config


class CompileSeconds:
  """Adds up XLA's seconds for compiling programs or loading cached ones."""

  def __init__(self):
    self.total = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, seconds: float, **kwargs) -> None:
    del kwargs
    if event.endswith('/backend_compile_duration'):
      self.total += seconds


def main() -> None:
  task = meter.this_task()
  if task.device_per_core:
    jax.config.update('jax_num_cpu_devices', os.cpu_count())
  compiling = CompileSeconds()
  # A row has the speeds of its folder, or those of the library, however long
  # the announced run is: this machine is not measured.
  form.LONG = math.inf
  clock = None

  def observe(row):
    nonlocal clock
    if row['split'] != 'train':
      return
    facts = json.loads((folder / 'facts.json').read_text())
    if clock is None:
      numbers = [g['parameters'] for g in facts['groups'].values()]
      clock = meter.Meter(task, sum(numbers), form=facts.get('form'))
    examples = sum(map(sum, facts['partition']))
    # All clients take part, or have equally many examples.
    share = row['clients'] / task.clients
    images = round(examples * share * task.local['epochs'])
    clock.facts.setdefault('xla_seconds', compiling.total)
    if clock.round(images):
      # The next round has begun already, and nobody needs it.
      shutil.rmtree(folder, ignore_errors=True)
      os._exit(0)

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    experiment.run(config_of(task), folder, observe=observe)


if __name__ == '__main__':
  main()
