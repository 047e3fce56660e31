"""The notebooks run from top to bottom, and are stored without outputs."""

import pathlib
import re

import jax
import pytest

nbformat = pytest.importorskip('nbformat', reason='notebooks: needs nbformat')
nbclient = pytest.importorskip('nbclient', reason='notebooks: needs nbclient')
pytest.importorskip('ipykernel', reason='notebooks: needs ipykernel')

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / 'colabs').glob('*.ipynb'))


def read(path):
  return nbformat.read(path, as_version=4)


def printed(notebook):
  """All that the cells wrote to their standard output."""
  return ''.join(
      output.text
      for cell in notebook.cells
      if cell.cell_type == 'code'
      for output in cell.outputs
      if output.output_type == 'stream' and output.name == 'stdout'
  )


def num_pictures(notebook):
  return sum(
      'image/png' in output.get('data', {})
      for cell in notebook.cells
      if cell.cell_type == 'code'
      for output in cell.outputs
  )


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_valid_and_stored_without_outputs(path):
  notebook = read(path)
  nbformat.validate(notebook)
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      assert not cell.outputs and cell.execution_count is None


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path, monkeypatch):
  pytest.importorskip('matplotlib', reason='the quickstart draws')
  # The kernel is a process of its own: it finds this checkout and the cache.
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.setenv(
      'JAX_COMPILATION_CACHE_DIR', jax.config.jax_compilation_cache_dir
  )
  notebook = read(ROOT / 'colabs' / 'quickstart.ipynb')
  nbclient.NotebookClient(
      notebook,
      timeout=300,
      kernel_name='python3',
      resources={'metadata': {'path': str(ROOT / 'colabs')}},
  ).execute()
  text = printed(notebook)
  assert 'mean over groups' in text
  scores = dict(re.findall(r'^(\w+): (0\.\d+)$', text, re.M))
  assert set(scores) == {'fedin', 'fedavg', 'fedavg_momentum'}
  for name, accuracy in scores.items():
    assert float(accuracy) > 0.4, name  # Ten classes.
  assert num_pictures(notebook) == 3
