"""What mkdocs does to the pages before they are rendered.

Pages are written to be read in the repository, too: they link to its files, and
their lists need no blank line above. The site holds `docs/` alone. The README's
table of methods is the only list of them: the site takes its index and its
navigation from there.
"""

import pathlib
import posixpath
import re

README = pathlib.Path(__file__).resolve().parents[1] / 'README.md'
INDEX = '<!-- the table of methods of the README -->'
_LINK = re.compile(r'(?<!!)\[([^\]]+)\]\(((?:\.\./)[^)#\s]+)(#[^)\s]*)?\)')
_FENCE = re.compile(r'^\s*```')
_ITEM = re.compile(r'^(- |\d+\. )')
_PAGE = re.compile(r'\(docs/(methods/\w+\.md)\)')


def table_of_methods(readme: str) -> str:
  """The README's table, with links from `docs/methods/index.md`."""
  lines = [line for line in readme.split('\n') if line.startswith('|')]
  begin = lines.index('| method | name | paper | communicated |')
  end = begin + 2
  while end < len(lines) and _PAGE.search(lines[end]):
    end += 1
  return '\n'.join(lines[begin:end]).replace('](docs/methods/', '](')


def method_pages(readme: str) -> list[str]:
  """The pages of the README's table, in its order, below `docs/`."""
  return _PAGE.findall(readme)


def name_files(markdown: str, folder: str) -> str:
  """Replaces links to files outside `docs/` by the names of these files.

  Args:
    markdown: A page.
    folder: Its folder below `docs/`, '' for `docs/` itself.

  Returns:
    The page; a link text that names its file stays alone.
  """

  def replace(match):
    text, target, _ = match.groups()
    path = posixpath.normpath(posixpath.join('docs', folder, target))
    if path.startswith('docs/'):
      return match[0]
    name = text.strip('`')
    return f'`{path}`' if path.startswith(name) else f'{text} (`{path}`)'

  return _LINK.sub(replace, markdown)


def separate_lists(markdown: str) -> str:
  """Puts a blank line above the first entry of each list."""
  lines, code, above = [], False, ''
  for line in markdown.split('\n'):
    starts = _ITEM.match(line) and above.strip() and not above.startswith(' ')
    if not code and starts and not _ITEM.match(above):
      lines.append('')
    code ^= bool(_FENCE.match(line))
    lines.append(line)
    above = line
  return '\n'.join(lines)


def on_config(config):
  """Called by mkdocs once: fills the navigation."""
  methods = next(entry for entry in config.nav if 'Methods' in entry)
  methods['Methods'] += method_pages(README.read_text())
  config.watch.append(str(README))
  return config


def on_page_markdown(markdown, page, **_):
  """Called by mkdocs for each page."""
  folder = posixpath.dirname(page.file.src_uri)
  markdown = markdown.replace(INDEX, table_of_methods(README.read_text()))
  return separate_lists(name_files(markdown, folder))
