"""Checks which small wrong changes of a method its tests notice.

  python -m tests.mutation.run --methods=fedprox,fedin --number=10 --seed=0

Each mutant of a file of a method is put into a copy of the repository. The
method's own test files run first, then the shared ones on this method. A
mutant survives if all of them pass: a test is missing, or the change makes no
difference. Results go to one JSON file per method; existing ones are not run
again.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

from fedjax_het.algorithms import ALGORITHMS
from tests.mutation.mutants import mutants

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALGORITHM_TESTS = pathlib.Path('tests', 'algorithms')
# Tests that run every method.
SHARED = [ALGORITHM_TESTS / f'test_{name}.py' for name in ('suite', 'clocks')]


def sources(method: str) -> list[pathlib.Path]:
  """A method's files, relative to the repository."""
  folder = pathlib.Path('fedjax_het', 'algorithms')
  found = [
      path
      for pattern in (f'{method}.py', f'{method}_*.py', f'{method}/**/*.py')
      for path in sorted((ROOT / folder).glob(pattern))
  ]
  return [path.relative_to(ROOT) for path in found]


def own_tests(method: str) -> list[str]:
  """The test files named after the method; else those that call it."""
  files = sorted((ROOT / ALGORITHM_TESTS).glob('test_*.py'))
  by_name = [f for f in files if f'{f.stem}_'.startswith(f'test_{method}_')]
  if not by_name:  # Simple methods share a file.
    by_name = [f for f in files if f'{method}(' in f.read_text()]
  return [str(f.relative_to(ROOT)) for f in by_name]


def is_killed(copy: pathlib.Path, method: str, timeout: float) -> str:
  """Which tests notice the mutant in a copy: 'own' or 'suite', '' for none."""
  command = [sys.executable, '-m', 'pytest', '-n', '0', '-x', '-q']
  for name, tests in (
      ('own', own_tests(method)),
      ('suite', [*map(str, SHARED), '-k', method]),
  ):
    if not tests:
      continue
    try:
      done = subprocess.run(
          [*command, *tests],
          cwd=copy,
          env={**os.environ, 'PYTHONPATH': str(copy)},
          capture_output=True,
          timeout=timeout,
          check=False,
      )
    except subprocess.TimeoutExpired:
      return f'{name}, by time'
    if done.returncode:
      return name
  return ''


def try_method(method: str, number: int, seed: int, timeout: float):
  """Tries mutants of one method.

  Args:
    method: A key of `ALGORITHMS`.
    number: Mutants to try.
    seed: Seed of the choice among all mutants.
    timeout: Seconds after which tests count as failed.

  Yields:
    A dict per mutant: file, line, change, and which tests noticed it.
  """
  found = [
      (path, mutant)
      for path in sources(method)
      for mutant in mutants((ROOT / path).read_text())
  ]
  chosen = random.Random(seed).sample(found, min(number, len(found)))
  with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder) / 'copy'
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns('.git', 'results', 'runs')
    )
    for path, mutant in chosen:
      (copy / path).write_text(mutant.text)
      by = is_killed(copy, method, timeout)
      (copy / path).write_text((ROOT / path).read_text())
      yield dict(
          file=str(path), line=mutant.line, change=mutant.what, noticed_by=by
      )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--methods', default=','.join(ALGORITHMS))
  parser.add_argument('--number', type=int, default=10)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--timeout', type=float, default=600.0)
  parser.add_argument('--out', type=pathlib.Path, default='mutations')
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  for method in args.methods.split(','):
    path = args.out / f'{method}-{args.seed}.json'
    if not path.exists():
      rows = []
      for row in try_method(method, args.number, args.seed, args.timeout):
        rows.append(row)
        print(method, row, flush=True)
      path.write_text(json.dumps(rows, indent=1))
    rows = json.loads(path.read_text())
    noticed = sum(bool(row['noticed_by']) for row in rows)
    print(f'{method}: {noticed} of {len(rows)} noticed', flush=True)
    for row in rows:
      if not row['noticed_by']:
        print(f'  survived: {row["file"]}:{row["line"]}: {row["change"]}')


if __name__ == '__main__':
  main()
