"""Random configs: every existing entry, with unexpected values.

The entries and their types come from `experiment.fields` and the constructors,
so a new option is tried without a change here.
"""

import dataclasses
import shutil
import typing

from hypothesis import strategies as st

from fedjax_het import experiment
from fedjax_het import options as opt
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.engine.clock import Device
from fedjax_het.engine.needs import needs_of
from fedjax_het.experiment.fields import CLOCK, FIELDS, LOCAL, SECTIONS
from fedjax_het.experiment.programs import make_driver
from fedjax_het.models import MODELS
from tests.experiment.tiny_runs import tiny_config

SMALL = st.sampled_from([0, 1, 2, 3, 5, 8, 16, 64])
EDGES = [7, 8, 15, 16, 31, 32, 40, 52, 53, 62, 63, 64, 100, 1024]
LARGE = st.builds(
    lambda power, shift: 2**power + shift,
    st.sampled_from(EDGES),
    st.sampled_from([-1, 0, 1]),
) | st.sampled_from([10**k for k in (3, 4, 5, 6, 9, 12, 18, 30)])
NEGATIVE = st.sampled_from([-1, -2, -(2**31), -(2**63) - 1])
FLOATS = st.sampled_from([
    0.0, 1e-3, 0.1, 0.5, 0.999999, 1.0, 1.5, 3.0, 10.0, 1e3, -0.0, -1.0,
    1e-7, 1e-30, 1e-46, 1e-300, 5e-324, 1e8, 1e30, 3.4e38, 3.5e38, 1e39, 1e300,
    float('nan'), float('inf'), -float('inf'),
])  # fmt: skip
TEXTS = st.sampled_from([
    '', ' ', '\n', '\0', 'a', '1/2', '1/0', '1e999', 'nan', '1e-9999', 'small',
    'é', '\ud800', '../..', '/', 'x' * 300, '1', '1,2', '0.5', '50MB', '1e400',
    '-1/2', 'mlp', 'small:1 large:1/2',
]) | st.text(max_size=8)  # fmt: skip
ODD = st.sampled_from([
    None, True, False, (), (1,), (0, 2**40), ('a',), [1, 2], {}, {'a': 1}, 1j,
    b'x', 2**63, 0.5, 'none',
])  # fmt: skip
# Entries whose values may be large without adding work.
FREE_OF_WORK = (
    'seed', 'sampling_seed', 'device_seed', 'group_seed', 'num_rounds',
    'eval_every', 'checkpoint_every', 'keep_checkpoints', 'lr_rounds',
    'rounds_per_dispatch', 'eval_batch_size', 'eval_clients_per_group',
)  # fmt: skip
Path = tuple[str, ...]


def entries(algorithm: str, partition: str, model: str) -> dict[Path, tuple]:
  """{path: (type, choices)} of all entries that a config may have."""
  found = {(name,): (f.kind, f.choices) for name, f in FIELDS.items()}
  for section, fields in (('local', LOCAL), ('clock', CLOCK)):
    for name, field in fields.items():
      found[section, name] = field.kind, field.choices
  for section, constructor in (
      ('algorithm', ALGORITHMS[algorithm]),
      ('partition', PARTITIONS[partition]),
  ):
    for name, (kind, _) in opt.keyword_options(constructor).items():
      found[section, name] = kind, ()
  for name, (kind, _) in opt.keyword_options(MODELS[model]).items():
    found['model', name] = kind, ()
    found['groups', 'small', name] = kind, ()
  for name, default in needs_of(ALGORITHMS[algorithm]).group_options.items():
    kind = str | None if default is None else type(default)
    found['groups', 'small', name] = kind, ()
  found['groups', 'small', 'partner'] = str, ('mlp',)
  found['groups', 'small', 'clients'] = int, ()
  found['groups', 'small', 'model'] = str, tuple(MODELS)
  found['algorithm', 'name'] = str, tuple(ALGORITHMS)
  for field in dataclasses.fields(Device):
    found['devices', 'phone', field.name] = field.type, ()
  found['devices', 'phone', 'clients'] = int, ()
  return found


def values(path: Path, kind, choices, work: bool):
  """Values for an entry: some are valid, a few have another type."""
  kinds = typing.get_args(kind) or (kind,)
  right = [
      values_
      for type_, values_ in (
          (int, st.sampled_from([1, 2, 3, 5, 8, 16])),
          (float, st.sampled_from([1e-3, 0.1, 0.25, 0.5, 1.0])),
          (bool, st.booleans()),
          (type(None), st.none()),
      )
      if type_ in kinds
  ]
  if choices:
    right = [st.sampled_from(choices)]
  strategies = []
  if choices:
    strategies += [st.sampled_from(choices)] * 4
  if int in kinds:
    large = LARGE if path[-1] in FREE_OF_WORK or not work else SMALL
    strategies += [SMALL, SMALL, large, large, NEGATIVE]
  if float in kinds:
    strategies += [FLOATS] * 4
  if bool in kinds:
    strategies += [st.booleans()] * 4
  if str in kinds and not choices:
    strategies += [TEXTS] * 3
  if type(None) in kinds:
    strategies += [st.none()]
  if not strategies or tuple in kinds:
    numbers = st.lists(SMALL | LARGE, max_size=3)
    strategies += [numbers.map(tuple), FLOATS, SMALL]
  if not work:
    strategies = strategies * 4 + [ODD]
  extreme = st.one_of(strategies)
  return st.one_of(right[0], right[-1], extreme) if right else extreme


@st.composite
def cases(draw, work: bool = False, models=('mlp', 'mlp', *MODELS)):
  """(method, partition, model, {path: value}).

  Args:
    draw: Hypothesis's draw function.
    work: Whether the config will be run; then its sizes stay small and its
      models are dense.
    models: The models to choose from if it will not be run.

  Returns:
    A case for `try_config`.
  """
  algorithm = draw(st.sampled_from([*ALGORITHMS]))
  partition = draw(st.sampled_from([*PARTITIONS]))
  model = draw(st.sampled_from(['mlp'] if work else models))
  known = entries(algorithm, partition, model)
  paths = draw(
      st.lists(st.sampled_from([*known]), min_size=1, max_size=3, unique=True)
  )
  changes = {path: draw(values(path, *known[path], work)) for path in paths}
  if not work and draw(st.integers(0, 19)) == 0:
    changes[draw(st.sampled_from(SECTIONS)),] = draw(ODD)
  return algorithm, partition, model, changes


def make(algorithm, partition, model, changes):
  """The config of a case, whose values may have any type."""
  config = tiny_config(algorithm)
  with config.unlocked(), config.ignore_type():
    config.partition = dict(name=partition, seed=0)
    config.groups.small.model = config.groups.large.model = model
    if model != 'mlp':
      config.model = {}
      for group in (config.groups.small, config.groups.large):
        del group['depth']
      if model not in ('simple_cnn', 'dropout_cnn', 'mini_vit4'):
        config.image_size = None
      else:
        config.image_size = 16
    if any(path[0] == 'devices' for path in changes):
      config.devices = dict(phone=dict(clients=5))
      if 'clock' not in (path[0] for path in changes):
        config.clock.mode = 'async'
    for (*path, name), value in changes.items():
      section = config
      for part in path:
        section = section[part]
      section[name] = value
  return config


def try_config(case, rounds: int = 0):
  """Checks and builds a config, and runs `rounds` rounds if not 0."""
  config = make(*case)
  experiment.check(config)
  if not rounds:
    make_driver(experiment.build(config))
    return
  seen = []

  def observe(row):
    seen.append(row)

  def stop():
    return sum(row.get('split') == 'train' for row in seen) >= rounds

  shutil.rmtree('run', ignore_errors=True)
  experiment.run(config, 'run', observe=observe, stop=stop)
