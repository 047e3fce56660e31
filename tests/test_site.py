"""The documentation site: its pages exist, and their examples run."""

import importlib.util
import re
import shlex

import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.options import keyword_options
from tests.fuzz import forks
from tests.test_docs import (
  DOCS,
  README,
  ROOT,
  examples,
  execute,
  shell_lines,
)

DOCS_ROOT = ROOT / 'docs'


def load_file(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


HOOKS = load_file(DOCS_ROOT / 'site_hooks.py')


def test_every_method_has_a_page_and_a_row():
  pages = HOOKS.method_pages(README.read_text())
  assert sorted(pages) == sorted(f'methods/{name}.md' for name in ALGORITHMS)
  for name in ALGORITHMS:
    text = (DOCS_ROOT / 'methods' / f'{name}.md').read_text()
    for part in ('Idea', 'What travels', '[Cc]ost', 'Result|Measured'):
      assert re.search(rf'^\*\*.*({part}).*?\*\*', text, re.M), (name, part)
    assert f'configs/{name}.py' in text, name
  table = HOOKS.table_of_methods(README.read_text())
  for name in ALGORITHMS:
    assert f'| [`{name}`]({name}.md) |' in table, name
  index = (DOCS_ROOT / 'methods' / 'index.md').read_text()
  assert HOOKS.INDEX in index


def constant(text):
  """A cell's number or word; None for a sentence or several values."""
  word = re.fullmatch(r'`?([\w/.+-]+)`?', text.strip())
  if not word:
    return None
  try:
    return float(word[1])
  except ValueError:
    return word[1]


# The page on optimisers documents these, so a method's page may leave them out.
SERVER = {'server_optimizer', 'server_lr', 'server_momentum', 'server_eps'}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_the_options_of_a_page_are_the_methods(name):
  page = (DOCS_ROOT / 'methods' / f'{name}.md').read_text()
  options, found = keyword_options(ALGORITHMS[name]), set()
  for cell, default in re.findall(r'^\| (`[^|]*) \| ([^|]*) \|', page, re.M):
    names = [n for n in re.findall(r'`([^`]*)`', cell) if '.' not in n]
    assert set(names) <= set(options)
    found.update(names)
    want = constant(default)
    if len(names) == 1 and want is not None:
      assert want == constant(str(options[names[0]][1])), names
  assert set(options) - SERVER <= found


def test_every_page_is_in_the_navigation():
  nav = (ROOT / 'mkdocs.yml').read_text().partition('validation:')[0]
  listed = set(re.findall(r'[\w/]+\.md', nav))
  listed.update(HOOKS.method_pages(README.read_text()))
  assert listed == {path.relative_to(DOCS_ROOT).as_posix() for path in DOCS}


def test_every_package_has_a_page_of_the_reference():
  packages = {
      path.parent.name for path in (ROOT / 'fedjax_het').glob('*/__init__.py')
  }
  pages = {path.stem for path in (DOCS_ROOT / 'reference').glob('*.md')}
  assert packages - {'configs'} == pages - {'index'}


def test_links_out_of_the_site_become_names():
  """Tables of `results/` are on the site; their data files are not."""
  text = '[a](../setup.py), [`launch/cli.py`](../launch/cli.py), [c](d.md#e)'
  assert HOOKS.name_files(text, 'page.md') == (
      'a (`setup.py`), `launch/cli.py`, [c](d.md#e)'
  )
  table = 'results/fedhe_mnist/table.md'
  for page, link in ('a.md', f'../{table}'), ('methods/b.md', f'../../{table}'):
    assert HOOKS.name_files(f'[{table}]({link}#top)', page) == (
        f'[{table}]({link.removeprefix("../")}#top)'
    )
  other = '[other](../../fedhe_fig8/cpu/table.md) ![](curves.png)'
  text = f'{other} [cells](../x/cells/a.json)'
  assert HOOKS.name_files(text, 'results/fedhe_fig7/cpu/table.md') == (
      f'{other} cells (`results/fedhe_fig7/x/cells/a.json`)'
  )


def test_lists_get_a_blank_line_above():
  text = 'Above:\n- a\n  more\n- b\n\n```\nx\n- y\n```'
  assert HOOKS.separate_lists(text) == text.replace('Above:', 'Above:\n')


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_the_tutorials_data_and_models(folder, monkeypatch):
  code = examples(DOCS_ROOT / 'tutorial.md')
  names = execute(code['data'])
  assert set(names['y'][:140]) == set(names['y'][140:]) == {0, 1, 2}
  (folder / 'my_net.py').write_text(code['net'])
  config = execute(code['config'])['get_config']()
  experiment.check(config)
  groups = experiment.build(config).federation.groups
  outputs = [group.model.outputs for group in groups]
  assert not set(outputs[0]) & set(outputs[1])  # They share no block.


def test_the_tutorial_reads_a_run(folder, monkeypatch, capsys):
  code = examples(DOCS_ROOT / 'tutorial.md')['read']

  class Run:
    def metrics(self, split):
      return dict(round=[0, 2], accuracy=[0.1, 0.5])

  monkeypatch.setattr('fedjax_het.load_run', lambda workdir: Run())
  execute(code)
  assert capsys.readouterr().out == '0 10.0%\n2 50.0%\n'


def test_partitions_of_ones_own(monkeypatch):
  code = examples(DOCS_ROOT / 'howto' / 'partition.md')
  assert execute(code['lists'])['data'].num_clients == 3
  from fedjax_het.data.partition import PARTITIONS

  monkeypatch.setitem(PARTITIONS, 'by_class', None)  # Undone afterwards.
  config = execute(code['function'])['get_config']()
  experiment.check(config)
  built = experiment.build(config)
  labels = built.dataset.train_labels
  assert [set(labels[part]) for part in built.parts] == [
      {k + 2} for k in range(6)
  ]


def test_an_optimizer_of_ones_own():
  local = execute(examples(DOCS_ROOT / 'optimizers.md')['clients'])[
      'local'
  ]
  tx = local.optimizer(local.learning_rate(0))
  params = np.ones(3, np.float32)
  updates, _ = tx.update(np.full(3, 9.0), tx.init(params), params)
  np.testing.assert_allclose(updates, -1e-3, rtol=0.01)


def test_a_task_of_ones_own(capsys):
  execute(examples(DOCS_ROOT / 'howto' / 'task.md')['regression'])
  losses = eval(capsys.readouterr().out)
  assert all(loss < 0.8 for loss in losses.values())  # The variance is 1.


@pytest.mark.slow
def test_the_commands_of_ones_own_data_and_models_run(folder):
  code = examples(DOCS_ROOT / 'tutorial.md')
  execute(code['data'])
  (folder / 'my_net.py').write_text(code['net'])
  (folder / 'my_config.py').write_text(code['config'])
  outputs = []
  for line in shell_lines(DOCS_ROOT / 'tutorial.md'):
    if re.search('my_config|wine', line):
      args = [arg for arg in shlex.split(line) if arg.startswith('--')]
      done = forks.run('train', args, folder)
      assert done.code == 0, done.err
      outputs.append(done.out)
  code = examples(DOCS_ROOT / 'howto' / 'partition.md')
  (folder / 'my_config.py').write_text(code['function'])
  done = forks.run('train', ['--config=my_config.py', '--dry_run'], folder)
  assert done.code == 0, done.err
  assert [out.splitlines()[-1] for out in outputs] == [
      f'Report: runs/{name}/report.md' for name in ('wine', 'my_net')
  ]
