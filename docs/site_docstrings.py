"""Turns docstrings into Markdown: links, and indented equations as blocks."""

import re

import griffe

_LINK = re.compile(r'`([^`<]+?)\s*<(https?://[^>\s]+)>`__?')


def to_markdown(text: str) -> str:
  """Rewrites links, and paragraphs that are indented by two spaces or more."""
  text = _LINK.sub(lambda m: f'[{" ".join(m[1].split())}]({m[2]})', text)
  paragraphs = text.split('\n\n')
  for i, paragraph in enumerate(paragraphs):
    lines = paragraph.split('\n')
    if all(line.startswith('  ') for line in lines if line):
      paragraphs[i] = '\n'.join(['```text', *lines, '```'])
  return '\n\n'.join(paragraphs)


class Docstrings(griffe.Extension):
  """Called by griffe for each object that it has read."""

  def on_object(self, *, obj, **_):
    """Rewrites the docstring of an object."""
    if obj.docstring is not None:
      obj.docstring.value = to_markdown(obj.docstring.value)
