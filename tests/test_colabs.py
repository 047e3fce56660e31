"""The notebooks run from top to bottom, and store their current outputs."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shlex
import sys
import types

import jax
import pytest

nbformat = pytest.importorskip('nbformat', reason='notebooks: needs nbformat')
pytest.importorskip('nbclient', reason='notebooks: needs nbclient')
pytest.importorskip('ipykernel', reason='notebooks: needs ipykernel')

from colabs.run import executed  # noqa: E402
from fedjax_het import experiment  # noqa: E402
from tests.experiment.tiny_runs import compiled_once, tiny_config  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / 'colabs').glob('*.ipynb'))
MOST_BYTES = 400_000
# Cells that all notebooks have in common: install, hardware, import, folder.
NUM_SETUP = 4


def read(path):
  return nbformat.read(path, as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def printed(notebook):
  """All that the cells wrote to their standard output."""
  return ''.join(
      output.text
      for cell in code_cells(notebook)
      for output in cell.outputs
      if output.output_type == 'stream' and output.name == 'stdout'
  )


def without_numbers(text):
  """The text without numbers and spacing, which differ between machines."""
  return re.sub(r'[\s-]+', ' ', re.sub(r'[\d.,]+', '#', text))


def outline(notebook):
  """The outputs of each cell: stream names, texts, and kinds of pictures."""
  return [
      [
          (output.name, without_numbers(output.text))
          if output.output_type == 'stream'
          else {
              kind: '' if kind.startswith('image') else without_numbers(value)
              for kind, value in output.data.items()
          }
          for output in cell.outputs
      ]
      for cell in code_cells(notebook)
  ]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_valid_and_stored_as_they_ran(path):
  notebook, text = read(path), path.read_text()
  nbformat.validate(notebook)
  assert path.stat().st_size < MOST_BYTES
  cells = code_cells(notebook)
  assert [c.execution_count for c in cells] == [*range(1, len(cells) + 1)]
  outputs = [output for cell in cells for output in cell.outputs]
  assert 'error' not in {output.output_type for output in outputs}
  assert {getattr(output, 'name', 'stdout') for output in outputs} == {'stdout'}
  assert any('image/png' in output.get('data', {}) for output in outputs)
  for private in ('/tmp/', '/root', '/home/', str(ROOT)):
    assert private not in text


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_set_up_alike_and_their_links_lead_somewhere(path):
  notebook, first = read(path), read(NOTEBOOKS[0])
  setup = [cell.source for cell in code_cells(notebook)[:NUM_SETUP]]
  assert setup == [cell.source for cell in code_cells(first)[:NUM_SETUP]]
  for cell in notebook.cells:
    if cell.cell_type == 'markdown':
      for link in re.findall(r'\]\((?!https?:)([^)]+)\)', cell.source):
        assert (path.parent / link).exists(), link


def setup_cell(place, **settings):
  """The code of a cell that all notebooks share, with other settings."""
  code = code_cells(read(NOTEBOOKS[0]))[place].source
  for name, value in settings.items():
    code, count = re.subn(
        f'^{name} = .*', f'{name} = {value!r}', code, flags=re.M
    )
    assert count == 1
  return code


def asked_of_pip(folder, monkeypatch, there=False, **settings):
  """Arguments of each `pip` that the install cell runs in a folder."""
  code, count = re.subn(r'%pip (.*)', r"pip(f'\1')", setup_cell(0, **settings))
  assert count == 1
  commands = []
  with monkeypatch.context() as patch:
    patch.chdir(folder)
    if not there:
      patch.setattr(importlib.util, 'find_spec', lambda name: None)
    exec(code, dict(pip=commands.append))
  return [shlex.split(command) for command in commands]


def test_the_install_cell_keeps_the_jax_that_is_there(tmp_path, monkeypatch):
  assert asked_of_pip(tmp_path, monkeypatch, there=True) == []
  assert not [*tmp_path.iterdir()]
  source = 'git+https://host/fedjax_het'
  ((*options, what),) = asked_of_pip(tmp_path, monkeypatch, SOURCE=source)
  assert what == f'fedjax_het @ {source}'
  assert options == ['install', '-q', '-c', 'kept.txt']
  kept = (tmp_path / 'kept.txt').read_text().splitlines()
  for package in ('jax', 'jaxlib'):
    assert f'{package}=={importlib.metadata.version(package)}' in kept
  asked_of_pip(tmp_path, monkeypatch, SOURCE=source, KEEP_JAX=False)
  assert not (tmp_path / 'kept.txt').read_text()


def test_the_install_cell_finds_a_wheel_or_says_what_it_needs(
    tmp_path, monkeypatch
):
  with pytest.raises(FileNotFoundError, match='No fedjax_het') as error:
    asked_of_pip(tmp_path, monkeypatch)  # As on Colab, without a checkout.
  message = str(error.value)
  assert message.startswith("No fedjax_het in '..': ")
  assert f'upload its wheel, fedjax_het-...whl, to {tmp_path}' in message
  assert message.endswith('or set SOURCE.') and '\n' not in message
  wheel = 'fedjax_het-0.1.0-py3-none-any.whl'
  (tmp_path / wheel).touch()
  for source in ('..', wheel):
    ((*_, what),) = asked_of_pip(tmp_path, monkeypatch, SOURCE=source)
    assert what == wheel
  (tmp_path / 'colabs').mkdir()
  (tmp_path / 'setup.py').touch()
  ((*_, what),) = asked_of_pip(tmp_path / 'colabs', monkeypatch)
  assert what == '..'


@pytest.mark.slow
def test_a_run_on_a_mounted_folder_goes_on_after_a_disconnect(
    tmp_path, monkeypatch, undrawn
):
  """Each session mounts Drive anew, and finds the files of the one before."""
  mounted, rows = [], []
  drive = types.SimpleNamespace(mount=mounted.append)
  code = setup_cell(3, MOUNT_DRIVE=True).replace(
      '/content/drive', str(tmp_path)
  )
  with compiled_once():
    for session in range(2):
      (tmp_path / f'machine{session}').mkdir()
      names = dict(pathlib=pathlib)
      with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'google', types.ModuleType('google'))
        patch.setitem(
            sys.modules, 'google.colab', types.SimpleNamespace(drive=drive)
        )
        patch.chdir(tmp_path / f'machine{session}')
        exec(code, names)
      assert names['FOLDER'] == f'{tmp_path}/MyDrive/runs'
      done = experiment.run(
          tiny_config(num_rounds=2), f'{names["FOLDER"]}/one',
          stop=lambda: session == 0,  # noqa: B023
      )  # fmt: skip
      assert done.finished == bool(session)
      rows.append(done.rows)
  assert mounted == [str(tmp_path)] * 2
  before, after = rows
  assert after[: len(before)] == before and after[-1]['round'] == 2
  assert not any(any(tmp_path.glob(f'machine{i}/*')) for i in range(2))


def test_colours_are_the_librarys():
  assert 'color=pictures.COLOURS' in setup_cell(2)
  for path in NOTEBOOKS:
    assert 'tab10' not in path.read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs a notebook on the CPU, with the tests' compilation cache."""
  pytest.importorskip('matplotlib', reason='the notebooks draw')
  monkeypatch.setenv('TMPDIR', str(tmp_path))

  def run(name, through=None, rounds=None, **environ):
    notebook = read(ROOT / 'colabs' / name)
    if rounds is not None:  # Two of so many, which takes less time.
      entries = 'config.num_rounds, config.eval_every ='
      old, new = f'{entries} {rounds}, 2\n', f'{entries} 2, 2\n'
      (cell,) = (cell for cell in notebook.cells if old in cell.source)
      cell.source = cell.source.replace(old, new)
    if through is not None:  # Keep the cells up to this text.
      last = [through in cell.source for cell in notebook.cells].index(True)
      notebook.cells = notebook.cells[: last + 1]
    nbformat.write(notebook, tmp_path / name)
    return executed(
        tmp_path / name,
        tmp_path,
        JAX_PLATFORMS='cpu',
        JAX_COMPILATION_CACHE_DIR=jax.config.jax_compilation_cache_dir,
        **environ,
    )

  return run


def check_stored(notebook, name):
  """Asserts that the outputs are the stored ones up to numbers and pictures."""
  found, stored = outline(notebook), outline(read(ROOT / 'colabs' / name))
  assert found == stored, f'python colabs/run.py {name} stores new outputs.'


@pytest.mark.slow
def test_the_quickstart_runs(run):
  notebook = run('quickstart.ipynb')
  check_stored(notebook, 'quickstart.ipynb')
  scores = dict(re.findall(r'^(\w+): (0\.\d+)$', printed(notebook), re.M))
  assert set(scores) == {'fedin', 'fedavg', 'fedavg_momentum'}
  for name, accuracy in scores.items():
    assert float(accuracy) > 0.4, name  # Ten classes.


@pytest.mark.slow
def test_fedin_on_fashion_mnist_runs(run, real_data):
  if not (pathlib.Path(real_data) / 'fashion_mnist').is_dir():
    pytest.skip('real data: no fashion_mnist')
  # With all optimisations: training takes longer here than compiling.
  notebook = run(
      'fedin_images.ipynb',
      rounds=8,
      FEDJAX_HET_DATA=str(real_data),
      JAX_DISABLE_MOST_OPTIMIZATIONS='0',
      XLA_FLAGS='',
  )
  check_stored(notebook, 'fedin_images.ipynb')
  assert 'fashion_mnist, 60,000 training images' in printed(notebook)


@pytest.mark.slow
def test_fedin_takes_the_digits_without_a_folder(run):
  """Runs all cells if the test above is skipped for lack of data."""
  some = 'here are the digits' if os.environ.get('FEDJAX_HET_DATA') else None
  notebook = run('fedin_images.ipynb', some, 8, FEDJAX_HET_DATA='')
  assert 'here are the digits instead' in printed(notebook)


@pytest.mark.slow
def test_the_budgets_of_fedepth_hold(run):
  notebook = run('fedepth_budgets.ipynb', rounds=6)
  check_stored(notebook, 'fedepth_budgets.ipynb')
  lines = re.findall(
      r'budget (\S+): (\S+) MB, (\S+) MB measured '
      r'in (\d) stages, accuracy (\S+)',
      printed(notebook),
  )
  assert [line[0] for line in lines] == ['1/3', '1']
  for _, budget, measured, _, accuracy in lines:
    assert float(measured) <= float(budget) + 0.01
    assert float(accuracy) > 0.5  # Ten classes.
  assert int(lines[0][3]) > int(lines[1][3]) == 1


@pytest.mark.slow
def test_what_is_your_own_runs(run):
  notebook = run('bring_your_own.ipynb')
  check_stored(notebook, 'bring_your_own.ipynb')
