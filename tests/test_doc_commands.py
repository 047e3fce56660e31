"""Every command of the README and the pages is parsed and checked."""

import contextlib
import importlib
import re
import shlex
import sys

from absl import flags
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data import sources
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.models import MODELS
from tests.test_docs import DOCS, README, examples, shell_lines

# A program of `launch` with its arguments.
LAUNCHED = re.compile(r'(?:python -m launch\.|fedjax-het )([\w-]+)(.*)')
# No programs of this library, or not of `launch`.
OTHERS = re.compile(
    r'$|# |pip install |python -m benchmarks\.accelerator|'
    r'(XDG_CACHE_HOME=\S+ \S+ )?python -m pytest'
)
# What a reader puts in.
NUMBERS = {'--num_processes=N': '2', '--process_id=I': '0'}
# Files of a page that its commands name or import: {page: {file: example}}.
FILES = {
    'adding_a_model': {'my_config.py': 'named', 'my_file.py': 'function'},
    'command_line': {'my_config.py': 'fleet', 'my_table.py': 'table'},
    'first_algorithm': {'my_config.py': 'config', 'fedmedian.py': 'algorithm'},
    'optimizers': {'mine.py': 'mine'},
    'partition': {'my_config.py': 'function'},
    'tutorial': {'my_config.py': 'config', 'my_net.py': 'net'},
    'your_data': {'my_config.py': 'source'},
}
# What these files add.
ADDED = (
    (ALGORITHMS, 'fedmedian'),
    (MODELS, 'net'),
    (PARTITIONS, 'by_class'),
    (sources.DATASETS, 'pixels'),
)


def commands():
  """A page, a program and its arguments, of each command."""
  for path in (README, *DOCS):
    for line in shell_lines(path):
      found = LAUNCHED.search(line)
      assert found or OTHERS.match(line), f'{path.name}: {line}'
      if found:
        name, rest = found.groups()
        if rest.count("'") % 2:  # The command is an argument itself.
          rest = rest.rstrip("'")
        args = [
            re.sub('=.*', f'={NUMBERS[arg]}', arg) if arg in NUMBERS else arg
            for arg in shlex.split(rest, comments=True)
        ]
        yield pytest.param(
            path, name, args, id=f'{path.stem}: {name} {" ".join(args)}'
        )


@contextlib.contextmanager
def parsed(name, args):
  """Parses a command line as in a process of its own, and runs nothing.

  Programs share names of flags, so each one gets modules and flags anew.

  Args:
    name: A command of fedjax-het.
    args: Its arguments.

  Yields:
    The module of the program; `flags.FLAGS` has its flags.

  Raises:
    SystemExit: If the command line is refused.
  """
  every, argv = vars(flags.FLAGS), sys.argv
  kept, fresh = dict(every), flags.FlagValues()
  for module, found in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith('absl.'):
      for flag in found:
        # Entries of a config count as absl's, but are of one command line.
        if not flag.name.startswith('config.'):
          fresh[flag.name] = flag
  modules = _launch_modules()
  every.clear()
  every.update(vars(fresh))
  try:
    cli = importlib.import_module('launch.cli')
    terminal = importlib.import_module('launch.terminal')
    terminal.run = lambda main, parser, *texts: parser(sys.argv)
    sys.argv = ['fedjax-het', name, *args]
    cli.main()
    yield sys.modules[f'launch.{name.replace("-", "_")}']
  finally:
    _launch_modules()
    sys.modules.update(modules)
    every.clear()
    every.update(kept)
    sys.argv = argv


def _launch_modules():
  """Takes the modules of `launch` out of those that are imported."""
  names = [n for n in sys.modules if n.partition('.')[0] == 'launch']
  return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize('page, name, args', commands())
def test_every_command_is_accepted(page, name, args, tmp_path, monkeypatch):
  for known, entry in ADDED:  # They are removed afterwards.
    monkeypatch.setitem(known, entry, None)
    del known[entry]
  monkeypatch.chdir(tmp_path)
  for file, example in FILES.get(page.stem, {}).items():
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    text = examples(page)[example]
    if example == 'function' and file == 'my_file.py':  # In two blocks.
      text = examples(page)['module'] + text
    path.write_text(text)
  with parsed(name, args) as program:
    given = {flag: flags.FLAGS[flag].value for flag in flags.FLAGS}
    if given.get('config') is not None:
      experiment.check(given['config'])
    if given.get('dataset') is not None:
      assert given['dataset'] in sources.DATASETS
    if given.get('table') is None:
      return
    files = importlib.import_module('launch.table_files')
    if name == 'sweep':
      found = program._find()
    else:
      found = files.find_table(given['table'], given['scale'])
    part = map(given.get, ('seeds', 'rows', 'cols'))
    files.choose(found.table, *part)  # Raises for what is not there.


def test_a_wrong_command_is_refused(capsys):
  before = dict(vars(flags.FLAGS)), dict(sys.modules)
  for name, args in (
      ('train', ['--config=fedin:quik']),
      ('train', ['--config.local.epochs=x']),
      ('report', ['--tabel=digits']),
      ('sweep', ['--config=fedin:quick']),
      ('privacy', ['--rounds=x']),
      ('plan-memory', ['--dry_run']),
      ('similarity', ['--print_config']),
      ('atack', []),
  ):
    with pytest.raises(SystemExit), parsed(name, args):
      pass
    assert capsys.readouterr().err.startswith('Error: ')
  assert dict(vars(flags.FLAGS)) == before[0]
  launched = {n: m for n, m in before[1].items() if n.startswith('launch')}
  assert _launch_modules() == launched
  sys.modules.update(launched)
