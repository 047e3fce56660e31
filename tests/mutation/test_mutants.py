"""The mutants of a module, and the files of a method that have mutants."""

import pytest

from tests.mutation.mutants import mutants
from tests.mutation.run import sources

MODULE = '''
def step(w, g, mask, *, mu: float = 0.1):
  """w - mu g where the mask says so."""
  if mu < 0:
    raise ValueError(f'{mu + 1}')
  moved = jnp.where(mask, w - mu * g, w)
  return jax.random.fold_in(moved, 3)
'''


def test_each_mutant_changes_one_expression():
  changes = [mutant.what for mutant in mutants(MODULE)]
  assert changes == [
      'jnp.where(mask, w - mu * g, w) -> w - mu * g',
      'jnp.where(mask, w - mu * g, w) -> w',
      'w - mu * g -> w + mu * g',
      'mu * g -> mu / g',
      'mu * g -> mu',
      'mu -> 2 * mu',
  ]


def test_mutants_are_modules_that_differ_in_one_line():
  want = {}
  for mutant in mutants(MODULE):
    compile(mutant.text, 'mutant', 'exec')
    want.setdefault(mutant.text, mutant)
  assert len(want) == 6
  assert all("raise ValueError(f'{mu + 1}')" in text for text in want)


@pytest.mark.parametrize('text', ['', 'x = 1 + 2\n', 'import jax\n'])
def test_what_is_no_function_has_no_mutant(text):
  assert mutants(text) == []


def test_all_files_of_a_method_are_changed():
  assert [path.name for path in sources('heterofl')] == [
      'heterofl.py', 'heterofl_widths.py',
  ]  # fmt: skip
  assert [path.name for path in sources('fedgkt')] == [
      '__init__.py', 'server.py',
  ]  # fmt: skip
