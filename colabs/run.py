r"""Runs notebooks of this folder from top to bottom and stores their outputs.

  python colabs/run.py                     # All of them.
  python colabs/run.py quickstart.ipynb
  python colabs/run.py --badges            # Runs nothing.

Each runs in a fresh process and an empty folder, with the library of this
checkout. FEDJAX_HET_DATA names the folder of Fashion-MNIST, with which the
outputs of `fedin_images.ipynb` are stored. `tests/test_colabs.py` compares the
stored outputs with new ones. A notebook of a repository on GitHub, by its
address in CITATION.cff, has a badge that opens it on Colab. Needs
nbclient and ipykernel, as the tests do.
"""

import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent
COLAB = 'https://colab.research.google.com'


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


def with_badge(notebook, name: str, citation: str):
  """Puts Colab's badge under a notebook's title, or takes it away.

  Args:
    notebook: The notebook; its first cell is changed.
    name: Its file.
    citation: The contents of CITATION.cff.

  Returns:
    The notebook; without a badge unless the repository is on GitHub.
  """
  title, _, rest = notebook.cells[0].source.partition('\n\n')
  rest = re.sub(r'\A\[!\[[^\n]*\n\n', '', rest)
  found = re.search(
      r'^repository-code: *[\'"]?https://github\.com/([\w.-]+/[\w.-]+)',
      citation, re.M,
  )  # fmt: skip
  if found:
    place = f'github/{found[1]}/blob/main/colabs/{name}'
    badge = f'![Open in Colab]({COLAB}/assets/colab-badge.svg)'
    rest = f'[{badge}]({COLAB}/{place})\n\n{rest}'
  notebook.cells[0].source = f'{title}\n\n{rest}'
  return notebook


def main() -> None:
  """Runs the notebooks that the command line names, or all."""
  names = [name for name in sys.argv[1:] if name != '--badges']
  citation = (FOLDER.parent / 'CITATION.cff').read_text(encoding='utf-8')
  for name in names or sorted(path.name for path in FOLDER.glob('*.ipynb')):
    if '--badges' in sys.argv:
      notebook = nbformat.read(FOLDER / name, as_version=4)
    else:
      with tempfile.TemporaryDirectory() as folder:
        notebook = executed(FOLDER / name, pathlib.Path(folder))
    with_badge(notebook, name, citation)
    nbformat.write(notebook, FOLDER / name)
    print(f'{name}: {(FOLDER / name).stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
  main()
