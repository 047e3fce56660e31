r"""Runs notebooks of this folder from top to bottom and stores their outputs.

  python colabs/run.py                     # All of them.
  python colabs/run.py quickstart.ipynb

Each runs in a fresh process and an empty folder, with the library of this
checkout. FEDJAX_HET_DATA names the folder of Fashion-MNIST, with which the
outputs of `fedin_images.ipynb` are stored. `tests/test_colabs.py` compares the
stored outputs with new ones. Needs nbclient and ipykernel, as the tests do.
"""

import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent


def executed(path: pathlib.Path, folder: pathlib.Path, **environ: str):
  """Runs a notebook.

  Args:
    path: The notebook.
    folder: An empty folder, in which its kernel runs and writes.
    **environ: Further entries of the kernel's environment.

  Returns:
    The notebook with the outputs of this run.

  Raises:
    nbclient.exceptions.CellExecutionError: If a cell raises an error.
  """
  notebook = nbformat.read(path, as_version=4)
  env = {
      **os.environ,
      'PYTHONPATH': str(FOLDER.parent),
      'IPYTHONDIR': str(folder / 'ipython'),
      **environ,
  }
  nbclient.NotebookClient(
      notebook,
      timeout=900,
      kernel_name='python3',
      record_timing=False,
      coalesce_streams=True,
      resources={'metadata': {'path': str(folder)}},
  ).execute(env=env)
  notebook.metadata.language_info = {'name': 'python'}
  return notebook


def main() -> None:
  """Runs the notebooks that the command line names, or all."""
  names = sys.argv[1:] or sorted(path.name for path in FOLDER.glob('*.ipynb'))
  for name in names:
    with tempfile.TemporaryDirectory() as folder:
      notebook = executed(FOLDER / name, pathlib.Path(folder))
    nbformat.write(notebook, FOLDER / name)
    print(f'{name}: {(FOLDER / name).stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
  main()
