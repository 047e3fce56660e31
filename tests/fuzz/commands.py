"""Command lines that must be refused, for every program of `launch`."""

from collections.abc import Iterator
import os
import pathlib

PROGRAMS = (
    'train', 'report', 'sweep', 'similarity', 'communication', 'prepare_data',
    'plan_memory', 'attack', 'tsne', 'privacy',
)  # fmt: skip
QUICK = '--config=configs/fedavg.py:quick'
NOT_UTF_8 = os.fsdecode(b'\xff\xfe')


def _everywhere(here: pathlib.Path) -> Iterator[list[str]]:
  """Mistakes that every program must refuse."""
  yield ['--foo']
  yield ['--foo=1']
  yield ['-q']
  yield [f'--{NOT_UTF_8}=1']
  yield ['--flagfile=missing']
  yield [f'--flagfile={here}']
  yield [f'--flagfile={here / "binary"}']
  yield [f'--flagfile={here / "unknown"}']
  yield ['--flagfile=']
  yield ['--flagfile']
  yield ['--verbosity=loud']
  yield ['--verbosity=0', '--verbosity=1']


def commands(here: pathlib.Path) -> list[tuple[str, list[str]]]:
  """The command lines.

  Args:
    here: An empty folder, in which the files that they name are created.

  Returns:
    (program, arguments), to be run in that folder.
  """
  (here / 'binary').write_bytes(b'\xff\xfe\0--foo\n')
  (here / 'unknown').write_text('--bar=1\n')
  (here / 'file').write_text('x')
  (here / 'wrong.py').write_text('def get_config(:\n')
  (here / 'none.py').write_text('x = 1\n')
  (here / 'returns_none.py').write_text('def get_config():\n  pass\n')
  (here / 'returns_list.py').write_text('def get_config():\n  return [1]\n')
  (here / 'returns_dict.py').write_text('def get_config():\n  return {}\n')
  (here / 'not_callable.py').write_text('get_config = 3\n')
  (here / 'raises.py').write_text('def get_config():\n  1 / 0\n')
  (here / 'imports.py').write_text('import no_such_module\n')
  (here / 'exits.py').write_text('raise SystemExit(0)\n')
  (here / 'recurses.py').write_text(
      'def get_config():\n  return get_config()\n'
  )
  (here / 'bytes.py').write_bytes(b'x = "\xff"\n')
  (here / 'zeros.py').write_bytes(b'x = 1\0\n')
  (here / 'deep.py').write_text('x = ' + '(' * 5000 + ')' * 5000 + '\n')
  (here / 'table.py').write_text('def get_table():\n  return None\n')
  (here / 'text.txt').write_text('def get_config():\n  pass\n')
  (here / 'folder').mkdir()
  (here / 'list').mkdir()
  (here / 'list' / 'config.json').write_text('[]')
  found = [(p, args) for p in PROGRAMS for args in _everywhere(here)]
  found += [(p, ['stray']) for p in PROGRAMS if p != 'report']
  files = sorted(path.name for path in here.glob('*.py'))
  files += ['missing.py', 'folder', 'binary', 'text.txt', '', NOT_UTF_8]
  for name in files:
    found.append(('train', [f'--config={name}', '--workdir=w']))
  for name in ('wrong.py', 'returns_none.py', 'missing.py', ''):
    found.append(('similarity', [f'--config={name}', '--workdir=w']))
    found.append(('plan_memory', [f'--config={name}']))
  quick = [
      ['--workdir='],
      ['--workdir'],
      ['--workdir=file'],
      ['--workdir=file/x'],
      ['--workdir=/proc/x'],
      ['--workdir=~no_such_user/x'],
      ['--workdir=' + 'x' * 300],
      ['--workdir=' + 'x/' * 3000],
      ['--workdir=a', '--workdir=b'],
      ['--workdir=list'],
      [QUICK],
      ['--config.seed=1', '--config.seed=2'],
      ['--config.seed='],
      ['--config.seed'],
      ['--config.=1'],
      ['--config.local=3'],
      ['--config.algorithm=fedinn'],
      ['--config.algorithm.name='],
      ['--config.algorithm.name=fedinn'],
      ['--config.partition.name=file'],
      ['--config.partition.name=iid', '--config.partition.alpha=1'],
      ['--workdir=gs://bucket/run'],
      ['--dry_run', '--config.dataset=mnist'],
      ['--config.groups='],
      ['--config.local.lr_rounds=1,'],
      ['--config.local.lr_rounds=(1'],
      ['--config.num_rounds=9' + '9' * 5000],
      [f'--config.dataset={NOT_UTF_8}'],
      ['--config.data_dir=~no_such_user/x', '--config.dataset=mnist'],
      ['--debug=maybe'],
      ['--distributed', '--num_processes=0', '--process_id=0'],
      ['--distributed', '--coordinator=nowhere'],
      ['--num_processes=2'],
  ]
  found += [('train', [QUICK, *args]) for args in quick]
  found += [
      ('similarity', [QUICK, '--workdir=~no_such_user/x']),
      ('similarity', [QUICK, '--num_examples=0']),
      ('similarity', [QUICK, '--num_clients=-1']),
      ('similarity', [QUICK, '--out=']),
      ('similarity', ['--config=configs/private.py:quick', '--out=file']),
      ('similarity', ['--config=configs/private.py:quick', '--workdir=file']),
      ('similarity', ['--workdirs=list']),
      ('similarity', ['--workdirs=w', '--out=file']),
      ('attack', []),
      ('attack', ['--workdir=']),
      ('attack', ['--workdir=list']),
      ('attack', ['--workdir=w', '--noise=']),
      ('attack', ['--workdir=w', '--noise=0,x']),
      ('attack', ['--workdir=w', '--noise=nan']),
      ('attack', ['--workdir=w', '--num_images=0']),
      ('attack', ['--workdir=w', '--out=file']),
      ('tsne', []),
      ('tsne', ['--workdir=~no_such_user/x']),
      ('tsne', ['--workdir=w', '--perplexity=nan']),
      ('tsne', ['--workdir=w', '--seed=-1']),
      ('privacy', ['--sigma=0']),
      ('privacy', ['--delta=1']),
      ('privacy', ['--epsilon=inf']),
      ('privacy', ['--sampling_rate=2']),
      ('plan_memory', [QUICK, '--budget_mb=']),
      ('plan_memory', [QUICK, '--budget_mb=x']),
      ('plan_memory', [QUICK, '--budget_mb=nan']),
      ('plan_memory', [QUICK, '--budget_mb=-1,inf']),
      ('plan_memory', [QUICK, '--budget_mb=1', '--budget_mb=2']),
      ('communication', ['--num_public=0']),
      ('communication', ['--num_public=-3']),
      ('communication', ['--num_public=x']),
      ('communication', ['--num_public=']),
      ('communication', ['--num_public=9' + '9' * 30]),
      ('communication', ['--num_public=1', '--num_public=2']),
      ('communication', ['--table=none']),
      ('communication', ['--table=fedin_v2_table1', '--data_dir=file']),
      ('prepare_data', []),
      ('prepare_data', ['--dataset=']),
      ('prepare_data', ['--dataset=cifar11']),
      ('prepare_data', ['--dataset=mnist']),
      ('prepare_data', ['--dataset=mnist', '--data_dir=']),
      ('prepare_data', ['--dataset=mnist', '--data_dir=~no_such_user']),
      ('prepare_data', ['--dataset=mnist', '--data_dir=file']),
      ('prepare_data', ['--dataset=mnist', '--data_dir=.', '--raw_dir=none']),
      ('prepare_data', ['--dataset=mnist', '--dataset=digits']),
      ('prepare_data', ['--dataset', NOT_UTF_8]),
      ('prepare_data', ['--verify=maybe']),
      ('report', []),
      ('report', ['']),
      ('report', ['none']),
      ('report', ['file']),
      ('report', ['folder']),
      ('report', ['list']),
      ('report', ['list', 'list']),
      ('report', [NOT_UTF_8]),
      ('report', ['~no_such_user/x']),
      ('report', ['x' * 300]),
      ('report', ['list', 'none', '--out=']),
      ('report', ['list', '--scale=cpu']),
      ('report', ['--table=none']),
      ('report', ['--table=']),
      ('report', ['--table=fedin_v2_table1', 'list']),
      ('report', ['--table=fedin_v2_table1', '--scale=none']),
      ('report', ['--table=fedin_v2_table1', '--out=file']),
      ('report', ['--table=fedin_v2_table1', '--out=folder']),
      ('report', ['--table=table.py']),
      ('report', ['--table=wrong.py']),
      ('report', ['--table=raises.py']),
      ('report', ['--table=imports.py']),
      ('report', ['--table=exits.py']),
      ('report', ['--table=bytes.py']),
      ('report', ['--table=zeros.py']),
      ('report', ['--table=folder']),
      ('report', ['--table=a', '--table=b']),
      ('sweep', ['--table=none']),
      ('sweep', ['--table=']),
      ('sweep', ['--table=deep.py']),
      ('sweep', ['--table=table.py']),
      ('sweep', ['--scale=none']),
      ('sweep', ['--seeds=']),
      ('sweep', ['--seeds=x']),
      ('sweep', ['--seeds=0']),
      ('sweep', ['--seeds=-1']),
      ('sweep', ['--seeds=0,0']),
      ('sweep', ['--seeds=9' + '9' * 30 + ',']),
      ('sweep', ['--seeds=9' + '9' * 5000]),
      ('sweep', ['--rows=']),
      ('sweep', ['--rows=none']),
      ('sweep', ['--rows=FedIN', '--rows=FedAvg']),
      ('sweep', ['--table=fedin_v2_table1', '--scale=quick', '--cols=none']),
      ('sweep', ['--table=fedin_v2_table1', '--scale=quick', '--out=file']),
      ('sweep', ['--scale=quick', '--workdirs=file', '--out=o']),
      ('sweep', ['--render', '--out=folder']),
      ('sweep', ['--render', '--out=~no_such_user/x']),
      ('sweep', ['--data_dir=~no_such_user', '--out=o']),
      ('sweep', ['--data_dir=', '--out=o']),
      ('sweep', ['--out=s3://bucket/o', '--render']),
      ('sweep', ['--formats=gif', '--render']),
      ('sweep', [QUICK]),
      ('sweep', ['--samples=3', '--scale=quick']),
      ('sweep', ['--grid=', QUICK]),
      ('sweep', ['--grid=x', QUICK]),
      ('sweep', ['--grid=algorithm.name=x', QUICK]),
      ('sweep', ['--grid=local.epochs=1', '--table=fashion_mnist', QUICK]),
      ('sweep', ['--grid=local.epochs=1', '--samples=x', QUICK]),
      ('sweep', ['--grid=local.epochs=(1', QUICK]),
  ]
  return found
