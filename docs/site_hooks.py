"""What mkdocs does to the pages before they are rendered.

Pages can also be read in the repository: they link to its files, and their
lists need no blank line above. The site holds `docs/`, and the tables and
pictures of `results/`. The README's table of methods is the only list of them:
the site takes its index and its navigation from there.
"""

import pathlib
import posixpath
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / 'README.md'
INDEX = '<!-- the table of methods of the README -->'
_LINK = re.compile(r'(?<!!)\[([^\]]+)\]\(((?:\.\./)[^)#\s]+)(#[^)\s]*)?\)')
_FENCE = re.compile(r'^\s*```')
_ITEM = re.compile(r'^(- |\d+\. )')
_PAGE = re.compile(r'\(docs/(methods/\w+\.md)\)')


def repository() -> str:
  """The repository's address from CITATION.cff; '' if it states none."""
  text = (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
  line = r'^repository-code: *[\'"]?(https?://[^\s\'"]+)'
  found = re.search(line, text, re.M)
  return found[1].rstrip('/') if found else ''


def is_result(path: str) -> bool:
  """Whether the site shows this file of `results/`, not of `docs/results/`."""
  shown = path.startswith('results/') and path.endswith(('.md', '.png'))
  return shown and not (ROOT / 'docs' / path).exists()


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


def name_files(markdown: str, uri: str) -> str:
  """Replaces links to files that the site lacks by the names of these files.

  Args:
    markdown: A page.
    uri: Its place on the site, such as 'methods/moon.md'.

  Returns:
    The page. A link becomes its text and the file's path, or the path alone if
    the path begins with the text.
  """
  here = posixpath.dirname(uri)
  folder = here if is_result(uri) else posixpath.join('docs', here)

  def replace(match):
    text, target, anchor = match.groups()
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith('docs/'):
      return match[0]
    if is_result(path) and (ROOT / path).exists():
      return f'[{text}]({posixpath.relpath(path, here or ".")}{anchor or ""})'
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
  """Called by mkdocs once: fills the navigation, links the repository."""
  if address := repository():
    config.repo_url, config.edit_uri = address, 'blob/HEAD/docs/'
  methods = next(entry for entry in config.nav if 'Methods' in entry)
  methods['Methods'] += method_pages(README.read_text())
  config.watch.append(str(README))
  return config


def on_files(files, config):
  """Called by mkdocs once: adds the tables and pictures of `results/`."""
  # Imported here, because the tests of this file run without mkdocs.
  from mkdocs.structure.files import File, InclusionLevel

  for path in sorted((ROOT / 'results').rglob('*')):
    uri = path.relative_to(ROOT).as_posix()
    if is_result(uri):
      files.append(
          File(
              uri,
              str(ROOT),
              config.site_dir,
              config.use_directory_urls,
              inclusion=InclusionLevel.NOT_IN_NAV,
          )
      )
  return files


def on_page_markdown(markdown, page, **_):
  """Called by mkdocs for each page."""
  markdown = markdown.replace(INDEX, table_of_methods(README.read_text()))
  return separate_lists(name_files(markdown, page.file.src_uri))
