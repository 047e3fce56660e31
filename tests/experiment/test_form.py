"""The form that `auto` chooses, stores, and keeps when a run resumes."""

import contextlib
import json
import subprocess

import jax
import pytest

from fedjax_het import experiment
from fedjax_het.experiment import duration, preview, tune, tuned
from fedjax_het.experiment import form as form_lib
from fedjax_het.experiment import predict as predict_lib
from fedjax_het.experiment.predict import Form
from fedjax_het.experiment.workdir import settle_config
from fedjax_het.kernels import libraries, onednn
from fedjax_het.models import create
from tests.experiment.tiny_runs import tiny_config, without_seconds

DEVICES = 4  # The tests' CPU devices.
DATE = '2026-01-31'
DENSE = tuned.Net(work=1e5, kernels=3, width=64.0, convolutional=False)
CONVOLUTIONS = tuned.Net(work=1e7, kernels=3, width=32.0, convolutional=True)


def table(dense=(100.0, 1000.0), convolutions=(100.0, 150.0, 200.0, 250.0)):
  """A table of images per second: XLA on 1 and 4 devices, then oneDNN."""
  forms = [('xla', 1), ('xla', DEVICES), ('onednn', 1), ('onednn', DEVICES)]
  cases = {
      'dense': (DENSE, dense), 'convolutions': (CONVOLUTIONS, convolutions)
  }  # fmt: skip
  return tuned.Table(DATE, DEVICES, {
      name: tuned.Case(net, tuple(
          tuned.Row(*form, speed, 2.0) for form, speed in zip(forms, speeds)
      ))
      for name, (net, speeds) in cases.items()
  })  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder without tables, in place of the user's."""
  monkeypatch.setenv('FEDJAX_HET_TUNED', str(tmp_path / 'tuned'))
  return tmp_path


@pytest.fixture
def library(monkeypatch):
  """Makes oneDNN available wherever the tests run."""
  monkeypatch.setattr(libraries, 'why_not', lambda conv_backend: None)


def federation_of(config, **models):
  if models:
    config.groups = models
    config.model = {}
  return experiment.build(config).federation


def test_a_table_comes_back_as_it_was_written(folder):
  assert tuned.read() is None
  path = tuned.write(table())
  assert tuned.read() == table()
  assert [p.name for p in (folder / 'tuned').iterdir()] == [path.name]


def test_a_table_of_another_version_is_not_used(folder, monkeypatch):
  path = tuned.write(table())
  other = {**tuned.key(), 'jaxlib': '0.0.1'}
  monkeypatch.setattr(tuned, 'key', lambda: other)
  assert tuned.read() is None
  # Nor if the file has the name of the other key.
  path.rename(tuned.table_path())
  assert tuned.read() is None


@pytest.mark.parametrize(
    'old, new',
    [
        ('}', ''),
        ('"key"', '"keys"'),
        ('"cases"', '"case"'),
        ('"images_per_second": 100.0', '"images_per_second": null'),
        ('"devices": 4', '"devices": 0'),
    ],
)
def test_a_damaged_table_is_ignored_in_one_line(folder, caplog, old, new):
  path = tuned.write(table())
  path.write_text(path.read_text().replace(old, new))
  assert chosen(tiny_config()) == predict_lib.PLAIN
  (line,) = (text for text in caplog.messages if str(path) in text)
  assert 'is damaged' in line
  assert line.endswith('`fedjax-het tune` measures again.')


def test_nets_are_described_by_their_shapes():
  net = predict_lib.describe(create('mlp', (8, 8, 1), 10, hidden=8))
  work = 64 * 8 + 8 * 8 + 8 * 10
  assert (net.work, net.kernels, net.convolutional) == (work, 3, False)
  net = predict_lib.describe(create('dropout_cnn', (8, 8, 1), 10))
  assert net.kernels == 4 and net.convolutional and 32 < net.width < 128


def test_the_nearest_net_has_the_kind_and_the_width_of_a_net():
  def nearest(net):
    found = predict_lib._nearest(net, measured)
    return next(name for name, case in cases.items() if case is found)

  nets = dict(
      thin=CONVOLUTIONS,
      wide=CONVOLUTIONS._replace(width=256.0),
      maps=CONVOLUTIONS._replace(width=256.0, work=3e8),
      dense=DENSE,
  )
  cases = {name: tuned.Case(net, ()) for name, net in nets.items()}
  measured = tuned.Table(DATE, 1, cases)
  for name, net in nets.items():
    assert nearest(net) == name
  assert nearest(CONVOLUTIONS._replace(width=8.0, work=1e6)) == 'thin'
  assert nearest(DENSE._replace(width=256.0, work=3e8)) == 'dense'
  del cases['dense']
  assert predict_lib._nearest(DENSE, measured) is None


@pytest.mark.parametrize('model, shape, near', [
    ('fedhe_cnn9', (32, 32, 3), 'wide convolutions'),
    ('fedhe_cnn5', (28, 28, 1), 'wide convolutions'),
    ('fedhe_cnn0', (32, 32, 3), 'wide convolutions, large maps'),
    ('resnet18', (32, 32, 3), 'wide convolutions'),
    ('preresnet20', (32, 32, 3), 'thin convolutions'),
    ('mlp', (8, 8, 1), 'small dense'),
])  # fmt: skip
def test_models_of_papers_are_near_a_net_of_their_kind(model, shape, near):
  cases = {
      name: tuned.Case(predict_lib.describe(work.make()), ())
      for name, work in tune._NETS.items()
  }
  net = predict_lib.describe(create(model, shape, 10))
  found = predict_lib._nearest(net, tuned.Table(DATE, 1, cases))
  assert found is cases[near]


def test_long_runs_take_the_fastest_form_and_short_ones_what_is_cached():
  federation = federation_of(tiny_config(), dropout_cnn=dict(clients=8))

  def best(num_rounds, **options):
    found = predict_lib.predict(
        federation, None, num_rounds, table(), **options
    )
    return min(found, key=found.get)

  assert best(10_000) == Form('onednn', DEVICES, DATE)
  # A program of oneDNN is compiled at each start.
  assert best(1) == Form('xla', DEVICES, DATE)
  assert best(1, cached=False) == Form('onednn', DEVICES, DATE)


def test_unequal_clients_stay_on_one_device():
  """A cohort of one client leaves the other devices idle."""
  found = predict_lib.predict(
      federation_of(tiny_config()), 1, 10, table(dense=(100.0, 300.0))
  )
  one, all_of_them = (Form('xla', n, DATE) for n in (1, DEVICES))
  assert found[one] < found[all_of_them]
  assert found[all_of_them] == pytest.approx(found[one] * DEVICES / 3)


def chosen(config, folder=None, **options):
  with contextlib.ExitStack() as stack:
    choose = form_lib.Chooser(config, folder, stack, **options)
    experiment.build(config, choose)
    return choose.form


def test_without_a_table_nothing_is_chosen(folder, caplog):
  caplog.set_level('INFO', 'fedjax_het')
  assert chosen(tiny_config()) == predict_lib.PLAIN
  assert caplog.messages[-1] == (
      'Dense layers on one device: not measured here; `fedjax-het tune` '
      'measures in a minute or two.'
  )


def test_speeds_of_another_machine_choose_until_this_one_is_measured(
    library, monkeypatch, caplog, tmp_path
):
  caplog.set_level('INFO', 'fedjax_het')
  monkeypatch.delenv('FEDJAX_HET_TUNED')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(tuned, 'cores', lambda: DEVICES)
  other = tuned.reference()
  assert other.devices == DEVICES and other.machine.endswith(', 2 cores')
  form = chosen(tiny_config(num_rounds=10_000, cohort_size=None))
  assert form[:2] == ('xla', DEVICES)
  assert caplog.messages[-1] == (
      f'Dense layers on {DEVICES} CPU devices follow measurements on '
      f'another machine ({other.machine}); `fedjax-het tune` measures this one '
      'in a minute or two.'
  )
  # oneDNN's programs are compiled at each start, so that a run below a minute
  # uses XLA's, though oneDNN is predicted to end first.
  convolutions = federation_of(tiny_config(), dropout_cnn=dict(clients=8))
  both = {1, DEVICES}
  of_all = max(predict_lib.predict(convolutions, None, 1000, other).values())
  for least, fixed, want in (
      (200, None, 'onednn'), (50, None, 'xla'), (50, 'onednn', 'onednn'),
      (200, 'xla', 'xla'),
  ):  # fmt: skip
    rounds = int(1000 * least / of_all)
    seconds = predict_lib.predict(convolutions, None, rounds, other)
    assert min(seconds, key=seconds.get).conv_backend == 'onednn'
    assert predict_lib.fastest(seconds, both, fixed).conv_backend == want
  # Measurements of this machine come first.
  tuned.write(table(dense=(100.0, 10.0)))
  assert chosen(tiny_config()) == Form('xla', 1, DATE)


def test_before_the_first_long_run_the_machine_is_measured(
    library, monkeypatch, caplog, tmp_path
):
  caplog.set_level('INFO', 'fedjax_het')
  monkeypatch.delenv('FEDJAX_HET_TUNED')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(tuned, 'cores', lambda: DEVICES)
  load, commands = [5.0, 0.0, 0.0], []
  monkeypatch.setattr(tune.os, 'getloadavg', lambda: (load[0],))

  def measured(command, **options):
    commands.append(command)
    if len(commands) == 1:
      return subprocess.CompletedProcess(command, 1, '', 'one\nNo room.\n')
    tuned.write(table())
    return subprocess.CompletedProcess(command, 0)

  monkeypatch.setattr(tune.subprocess, 'run', measured)
  long = tiny_config(num_rounds=100_000_000)
  other = tuned.reference()

  # First other processes run, then measuring fails, then it succeeds.
  assert chosen(long, measures=True).machine == other.machine
  assert 'other processes run (load 5.0)' in caplog.text and not commands
  load[0] = 0.0
  for config in (long, tiny_config()):
    assert chosen(config).machine == other.machine  # As for a preview.
  assert chosen(tiny_config(), measures=True).machine == other.machine
  assert not commands
  assert chosen(long, measures=True).machine == other.machine
  assert 'could not be measured (No room.)' in caplog.text
  assert chosen(long, measures=True) == Form('xla', DEVICES, DATE)
  assert 'measuring this machine first, once' in caplog.text
  assert commands[0][1:] == ['-m', 'fedjax_het.experiment.tune']
  # It is measured only once.
  assert chosen(long, measures=True).date == DATE and len(commands) == 2


def test_one_process_measures_and_with_devices_of_its_own(
    folder, monkeypatch, caplog
):
  environments = []

  def measured(command, *, env, **options):
    environments.append(env)
    assert tune.measure_apart() is None  # Another process, meanwhile.
    tuned.write(table())
    return subprocess.CompletedProcess(command, 0)

  monkeypatch.setattr(tune.subprocess, 'run', measured)
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '7')
  flags = '--xla_a=1 --xla_force_host_platform_device_count=7 --xla_b=2'
  monkeypatch.setenv('XLA_FLAGS', flags)
  assert tune.measure_apart() == table()
  assert 'another process measures it' in caplog.text
  (env,) = environments
  assert env['XLA_FLAGS'] == '--xla_a=1 --xla_b=2'
  assert 'JAX_NUM_CPU_DEVICES' not in env and env['PATH']


def test_nothing_is_measured_that_cannot_be_stored(
    folder, monkeypatch, caplog
):
  (folder / 'tuned').write_text('a file')
  monkeypatch.setattr(tune.subprocess, 'run', None)
  assert tune.measure_apart() is None
  assert 'could not be measured' in caplog.text


@pytest.mark.parametrize('number, found', [(1, None), (2, 2), (64, 16)])
def test_devices_without_measurements_are_bounded(monkeypatch, number, found):
  monkeypatch.delenv('FEDJAX_HET_TUNED')
  monkeypatch.setattr(tuned, 'cores', lambda: number)
  table = tuned.reference()
  assert (table and table.devices) == found
  monkeypatch.setenv('FEDJAX_HET_TUNED', 'a_folder')
  assert tuned.reference() is None


def test_a_preview_is_of_the_form_that_a_run_takes(
    folder, library, monkeypatch
):
  monkeypatch.setattr(duration, '_step_seconds', lambda *args: 0.5)
  tuned.write(table())
  text = '\n'.join(preview.lines(tiny_config()))
  assert f'on {DEVICES} CPU devices: measured on this machine on ' in text
  assert 'local training a round on one of the devices, ' in text
  begun = folder / 'begun'
  begun.mkdir()
  config = tiny_config()
  settle_config(begun, config)
  text = '\n'.join(preview.lines(config, begun))
  assert 'on one device, as the run was begun' in text
  assert 'local training a round, ' in text
  with pytest.raises(ValueError, match='cloud folders are not supported'):
    preview.lines(config, 'gs://bucket/run')


@pytest.mark.parametrize(
    ('ids', 'text'),
    [
        ([4], '4'),
        ([0, 1, 2, 9], '0-2, 9'),
        ([0, 2, 4, 6, 8], '0, 2, 4, 6 ...'),
    ],
)
def test_a_preview_names_a_groups_clients(ids, text):
  assert preview._ranges(ids) == text


def test_what_a_config_says_is_kept(folder, library, caplog):
  caplog.set_level('INFO', 'fedjax_het')
  tuned.write(table())
  assert chosen(tiny_config()) == Form('xla', DEVICES, DATE)
  assert caplog.messages[-1] == (
      f'Dense layers on {DEVICES} CPU devices: measured on '
      f'this machine on {DATE}.'
  )
  for entry in (
      dict(backend='map'), dict(chunk=2), dict(client_store='host'),
      dict(clock__mode='async'),
  ):  # fmt: skip
    assert chosen(tiny_config(**entry)) == Form('xla', 1, DATE), entry
  assert chosen(tiny_config(backend='vmap')) is None
  assert chosen(tiny_config(backend='map', conv_backend='xla')) is None


def test_the_line_is_of_what_was_chosen(folder, caplog):
  caplog.set_level('INFO', 'fedjax_het')
  config = experiment.default_config('fedavg')  # Convolutional nets.
  chosen(config)
  where = "XLA's convolutions on one device: not measured here; "
  assert caplog.messages[-1].startswith(where)
  config.backend = 'shard_map'
  chosen(config)
  assert caplog.messages[-1].startswith("XLA's convolutions: not measured")
  caplog.clear()
  chosen(tiny_config(backend='shard_map'))  # Dense nets have no choice left.
  assert not [line for line in caplog.messages if 'measured' in line]


def test_a_gain_of_a_few_percent_changes_nothing(folder):
  tuned.write(table(dense=(100.0, 104.0)))
  assert chosen(tiny_config(cohort_size=None)) == Form('xla', 1, DATE)


def test_a_form_that_is_not_possible_here_is_not_resumed(folder, caplog):
  (folder / 'config.json').write_text('{}')
  form = Form('xla', 99, DATE)
  (folder / 'form.json').write_text(json.dumps(form._asdict()))
  assert chosen(tiny_config(), folder) == predict_lib.PLAIN
  assert 'last bits may differ' in caplog.text
  (folder / 'form.json').write_text('{')
  assert chosen(tiny_config(), folder) == predict_lib.PLAIN
  assert 'the run goes on with the plain form' in caplog.text


def test_a_run_that_goes_on_leaves_devices_to_the_next(folder, monkeypatch):
  """In a sweep JAX starts once; the first cell may be an unmeasured one."""
  started = []
  monkeypatch.setattr(tuned, 'start_devices', started.append)
  tuned.write(table())
  (folder / 'config.json').write_text('{}')
  for form in (None, Form('xla', 1, DATE), Form('xla', 2, DATE)):
    if form is not None:
      (folder / 'form.json').write_text(json.dumps(form._asdict()))
    with contextlib.ExitStack() as stack:
      form_lib.Chooser(tiny_config(), folder, stack)
  assert started == [DEVICES, DEVICES, 2]


def test_a_library_that_is_gone_is_not_resumed_with(
    folder, monkeypatch, caplog
):
  (folder / 'config.json').write_text('{}')
  form = Form('onednn', 1, DATE)
  (folder / 'form.json').write_text(json.dumps(form._asdict()))
  monkeypatch.setattr(onednn, 'TESTED', ('0.0.1',))
  assert chosen(tiny_config(), folder) == predict_lib.PLAIN
  assert "with oneDNN's convolutions on one device" in caplog.text


def test_several_processes_go_on_without_the_form(folder, monkeypatch, caplog):
  (folder / 'config.json').write_text('{}')
  form = Form('onednn', 1, DATE)
  (folder / 'form.json').write_text(json.dumps(form._asdict()))
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  with contextlib.ExitStack() as stack:
    form_lib.Chooser(tiny_config(), folder, stack)
  assert 'goes on without (there are several processes)' in caplog.text


def test_a_run_that_goes_on_keeps_its_form(folder):
  (folder / 'config.json').write_text('{}')
  tuned.write(table())
  # The run began before anything was measured.
  assert chosen(tiny_config(), folder) == predict_lib.PLAIN
  form = Form('xla', 1, DATE)
  (folder / 'form.json').write_text(json.dumps(form._asdict()))
  assert chosen(tiny_config(), folder) == form


@pytest.mark.slow
@pytest.mark.usefixtures('undrawn', 'users_generator')
def test_a_run_goes_on_with_the_form_with_which_it_began(folder):
  """Even if other speeds have been measured since."""
  config = tiny_config(cohort_size=None, num_rounds=2, checkpoint_every=1)
  plain = experiment.run(config, folder / 'plain')
  assert not (folder / 'plain' / 'form.json').exists()
  assert plain.facts['form'] == predict_lib.PLAIN._asdict()
  path = tuned.write(table(dense=(1.0, 100.0)))

  whole = experiment.run(config, folder / 'whole')
  form = Form('xla', DEVICES, DATE)
  assert whole.facts['form'] == form._asdict()
  stored = json.loads((folder / 'whole' / 'config.json').read_text())
  assert stored['backend'] == stored['conv_backend'] == 'auto'

  rows, cut = [], folder / 'cut'
  experiment.run(config, cut, observe=rows.append, stop=lambda: bool(rows))
  path.unlink()
  assert experiment.run(config, cut).facts['form'] == form._asdict()
  assert without_seconds(cut / 'metrics.jsonl') == without_seconds(
      folder / 'whole' / 'metrics.jsonl'
  )
  # A run that began without a table keeps the plain form.
  tuned.write(table())
  config.num_rounds = 3
  longer = experiment.run(config, folder / 'plain')
  assert longer.facts['form'] == predict_lib.PLAIN._asdict()
  assert experiment.load_run(folder / 'whole').models()


def test_runs_of_versions_without_auto_go_on(folder):
  config = tiny_config()
  assert settle_config(folder, config)
  stored = json.loads((folder / 'config.json').read_text())
  for value in ('xla', None, 'auto'):
    stored['conv_backend'] = value
    if value is None:
      del stored['conv_backend']
    (folder / 'config.json').write_text(json.dumps(stored))
    assert not settle_config(folder, config)
  stored['conv_backend'] = 'onednn'
  (folder / 'config.json').write_text(json.dumps(stored))
  with pytest.raises(ValueError, match="conv_backend is 'onednn' there"):
    settle_config(folder, config)


def test_devices_are_left_to_a_user_who_sets_them(folder, monkeypatch):
  """The tests set them, and JAX has started."""
  before = jax.config.jax_num_cpu_devices
  tuned.write(table()._replace(devices=2))
  form_lib.Chooser(tiny_config(), None, contextlib.ExitStack())
  assert jax.config.jax_num_cpu_devices == before == DEVICES
