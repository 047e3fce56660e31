"""Small wrong changes of a module: signs, factors, masks, swapped arguments.

A mutant is the module's text with one node of its syntax tree changed. Only
function bodies are changed, except errors, checks, signatures, and the numbers
that random keys are folded with.
"""

import ast
from collections.abc import Iterator
import copy
from typing import NamedTuple

# Calls whose arguments are no part of an equation.
_SPARED = {
    'at_least', 'between', 'not_negative', 'one_of', 'positive', 'requires',
    'fold_in', 'split', 'range', 'len', 'isinstance', 'reshape', 'expand_dims',
    'astype', 'broadcast_to', 'getattr', 'zip', 'eval_shape',
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_COMPARISONS = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
# Functions that act as operators, and their replacements.
_FUNCTIONS = {'add': 'subtract', 'subtract': 'add', 'maximum': 'minimum'}
# Calls whose first two arguments are not swapped.
_SYMMETRIC = {'add', 'maximum', 'minimum', 'min', 'max', 'map', 'cond'}


class Mutant(NamedTuple):
  """One wrong version of a module.

  Attributes:
    line: Line of the change.
    what: The expression before and after.
    text: Source of the changed module.
  """

  line: int
  what: str
  text: str


def _name(call: ast.Call) -> str:
  """The last part of the called function's name."""
  func = call.func
  return getattr(func, 'attr', getattr(func, 'id', ''))


def _places(tree: ast.Module) -> Iterator[ast.expr]:
  """Expressions in functions that may be part of an equation."""

  def visit(node):
    if isinstance(node, (ast.Raise, ast.Assert, ast.arguments)):
      return
    if isinstance(node, ast.Call) and _name(node) in _SPARED:
      return
    if isinstance(node, ast.Subscript):
      yield from visit(node.value)
      return
    if isinstance(node, ast.If) and any(
        isinstance(inner, ast.Raise) for inner in node.body
    ):
      return
    if isinstance(node, ast.FunctionDef) and node.name.startswith('_check'):
      return
    if isinstance(node, ast.expr):
      yield node
    for child in ast.iter_child_nodes(node):
      yield from visit(child)

  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef) and node in tree.body:
      for statement in node.body:
        yield from visit(statement)


def _factors(tree: ast.Module) -> set[str]:
  """Names of the real-valued options of a module's functions."""
  return {
      arg.arg
      for node in tree.body
      if isinstance(node, ast.FunctionDef)
      for arg in (*node.args.args, *node.args.kwonlyargs)
      if arg.annotation is not None
      and ast.unparse(arg.annotation) in ('float', 'float | None')
  }


def _versions(node: ast.expr, factors: set[str]) -> Iterator[ast.expr]:
  """Wrong versions of one expression."""
  match node:
    case ast.Name(id=name, ctx=ast.Load()) if name in factors:
      yield ast.BinOp(ast.Constant(2), ast.Mult(), node)
    case ast.BinOp(op=op) if type(op) in _OPERATORS:
      if isinstance(node.left, (ast.Tuple, ast.JoinedStr)):
        return
      yield ast.BinOp(node.left, _OPERATORS[type(op)](), node.right)
      if isinstance(op, ast.Mult):
        yield node.left
    case ast.BinOp(op=ast.Pow()):
      yield node.left
    case ast.UnaryOp(op=ast.USub()):
      yield node.operand
    case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
      if isinstance(node.comparators[0], ast.Constant) and isinstance(
          node.comparators[0].value, str
      ):
        return
      yield ast.Compare(
          node.left, [_COMPARISONS[type(op)]()], node.comparators
      )
    case ast.Call(args=[_, first, second]) if _name(node) == 'where':
      yield first
      yield second
    case ast.Call(args=[only]) if _name(node) == 'stop_gradient':
      yield only
    case ast.Call(args=[first, second, *rest], keywords=[]):
      if _name(node) not in _SYMMETRIC | {'switch', 'fori_loop'}:
        yield ast.Call(node.func, [second, first, *rest], [])
    case ast.Attribute(attr=name) if name in _FUNCTIONS:
      yield ast.Attribute(node.value, _FUNCTIONS[name], ast.Load())
    case ast.Constant(value=int() | float() as value) if not isinstance(
        value, bool
    ):
      yield ast.Constant(2 * value if value else 1)


def mutants(text: str) -> list[Mutant]:
  """All mutants of a module.

  Args:
    text: Source of the module.

  Returns:
    The mutants that differ from it, in the order of the changed expressions.
  """
  tree = ast.parse(text)
  places, factors = list(_places(tree)), _factors(tree)
  found = []
  for place in places:
    for version in _versions(place, factors):
      if ast.unparse(version) == ast.unparse(place):
        continue
      changed = _replaced(tree, place, version)
      what = f'{ast.unparse(place)} -> {ast.unparse(version)}'
      found.append(Mutant(place.lineno, what, changed))
  return found


def _replaced(tree: ast.Module, place: ast.expr, version: ast.expr) -> str:
  """The module with one expression replaced."""

  class Replace(ast.NodeTransformer):

    def visit(self, node):
      return version if node is place else self.generic_visit(node)

  # The transformer changes a copy of the tree that shares these two nodes.
  memo = {id(place): place, id(version): version}
  return ast.unparse(
      ast.fix_missing_locations(Replace().visit(copy.deepcopy(tree, memo)))
  )
