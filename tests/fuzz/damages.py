"""Damages to a workdir, each determined by a seed."""

import json
import os
import pathlib
import random
import shutil


def _files(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
  """The files to damage, by kind, so that all kinds are equally likely."""
  checkpoints = folder / 'checkpoints'
  steps = sorted(
      (path for path in checkpoints.iterdir() if path.name.isdigit()),
      key=lambda path: int(path.name),
  )

  def inside(path):
    return sorted(p for p in path.rglob('*') if p.is_file())

  return {
      'config': [folder / 'config.json'],
      'metrics': [folder / 'metrics.jsonl'],
      'facts': [folder / 'facts.json'],
      'report': [folder / 'report.md', folder / '.lock'],
      'newest': inside(steps[-1]),
      'older': [p for step in steps[:-1] for p in inside(step)],
      'beside': sorted(p for p in checkpoints.iterdir() if p.is_file()),
  }


def _truncate(path, rng):
  os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def _cut_a_little(path, rng):
  os.truncate(path, max(0, path.stat().st_size - rng.randint(1, 20)))


def _empty(path, rng):
  del rng
  path.write_bytes(b'')


def _delete(path, rng):
  del rng
  path.unlink()


def _flip_a_bit(path, rng):
  data = bytearray(path.read_bytes())
  if data:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  path.write_bytes(data)


def _flip_bits(path, rng):
  data = bytearray(path.read_bytes())
  for _ in range(min(len(data), 50)):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  path.write_bytes(data)


def _noise(path, rng):
  path.write_bytes(rng.randbytes(rng.choice([1, 100, 5000])))


def _zeros(path, rng):
  data = bytearray(path.read_bytes())
  begin = rng.randrange(max(1, len(data)))
  end = min(len(data), begin + rng.randint(1, 600))
  data[begin:end] = bytes(end - begin)
  path.write_bytes(data)


def _insert_bytes(path, rng):
  data = path.read_bytes()
  at = rng.randrange(len(data) + 1)
  junk = rng.choice([b'\xff', b'\xc3\x28', b'\0\0\0', b'\r', b'\n', b'\x1a'])
  path.write_bytes(data[:at] + junk + data[at:])


def _byte_order_mark(path, rng):
  mark = rng.choice([b'\xef\xbb\xbf', b'\xff\xfe'])
  path.write_bytes(mark + path.read_bytes())


def _utf_16(path, rng):
  del rng
  path.write_bytes(path.read_bytes().decode('latin1').encode('utf-16'))


def _crlf(path, rng):
  del rng
  path.write_bytes(path.read_bytes().replace(b'\n', b'\r\n'))


def _folder_instead(path, rng):
  path.unlink()
  path.mkdir()
  if rng.random() < 0.5:
    (path / 'file').write_text('x')


def _dangling_link(path, rng):
  del rng
  path.unlink()
  path.symlink_to('nowhere')


def _link_to_itself(path, rng):
  del rng
  path.unlink()
  path.symlink_to(path.name)


def _pipe_instead(path, rng):
  del rng
  path.unlink()
  os.mkfifo(path)


def _other_contents(path, rng):
  others = sorted(p for p in path.parent.rglob('*') if p.is_file())
  path.write_bytes(rng.choice(others).read_bytes())


def _partial_last_line(path, rng):
  with open(path, 'ab') as file:
    file.write(rng.choice([b'{"round": 9, "spl', b'{', b'\0', b'}\n', b'x']))


def _lines(change):
  def apply(path, rng):
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
      change(lines, rng)
    path.write_bytes(b''.join(lines))

  apply.__name__ = change.__name__
  return apply


def _double_a_line(lines, rng):
  i = rng.randrange(len(lines))
  lines.insert(i, lines[i])


def _swap_lines(lines, rng):
  i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
  lines[i], lines[j] = lines[j], lines[i]


def _lose_lines(lines, rng):
  i = rng.randrange(len(lines))
  del lines[i : i + rng.randint(1, 3)]


def _change_a_digit(lines, rng):
  i = rng.randrange(len(lines))
  digits = [j for j, c in enumerate(lines[i]) if chr(c).isdigit()]
  if digits:
    j = rng.choice(digits)
    lines[i] = lines[i][:j] + b'7' + lines[i][j + 1 :]


def _json(value):
  def apply(path, rng):
    del rng
    path.write_text(value)

  apply.__name__ = f'_json_{value[:8]!r}'
  return apply


def _nodes(tree, found):
  """All (container, key) pairs of a JSON value."""
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  for key, value in items:
    found.append((tree, key))
    if isinstance(value, dict | list):
      _nodes(value, found)
  return found


_VALUES = (
    None, True, 0, -1, 1.5, 1e308, 10**30, '', 'x', '\ud800', [], {}, [1], [[]],
    {'name': 1}, 'a' * 1000,
)  # fmt: skip


def _change_a_value(path, rng):
  """Deletes an entry of a JSON file or line, or replaces its value."""
  lines = path.read_text().splitlines()
  whole = path.suffix == '.json' or not lines
  i = 0 if whole else rng.randrange(len(lines))
  tree = json.loads('\n'.join(lines) if whole else lines[i])
  container, key = rng.choice(_nodes(tree, []))
  if rng.random() < 0.4:
    del container[key]
  else:
    container[key] = rng.choice(_VALUES)
  if whole:
    path.write_text(json.dumps(tree))
  else:
    lines[i] = json.dumps(tree)
    path.write_text('\n'.join(lines) + '\n')


ANY = (
    _truncate, _cut_a_little, _empty, _delete, _flip_a_bit, _flip_bits, _noise,
    _zeros, _insert_bytes, _folder_instead, _dangling_link, _link_to_itself,
    _pipe_instead, _other_contents,
)  # fmt: skip
TEXT = (
    _byte_order_mark, _utf_16, _crlf, _partial_last_line,
    _lines(_double_a_line), _lines(_swap_lines), _lines(_lose_lines),
    _lines(_change_a_digit), _change_a_value, _json('null'), _json('[]'),
    _json('{}'), _json('3'), _json('"x"'), _json('NaN'),
    _json('[' * 5000 + ']' * 5000), _json('{"a":' * 5000 + '1' + '}' * 5000),
    _json('9' * 5000),
)  # fmt: skip


def _delete_a_folder(folder, rng):
  del rng
  shutil.rmtree(folder)


def _empty_a_folder(folder, rng):
  del rng
  shutil.rmtree(folder)
  folder.mkdir()


def _empty_the_files(folder, rng):
  del rng
  for path in folder.rglob('*'):
    if path.is_file():
      path.write_bytes(b'')


def _file_instead(folder, rng):
  del rng
  shutil.rmtree(folder)
  folder.write_text('x')


def _rename(folder, rng):
  folder.rename(folder.with_name(rng.choice(['9', '0', '007', 'x', '-1', '²'])))


def _copy(folder, rng):
  name = rng.choice(['9', '007', 'x', '99999999999999999999', '²', '٣'])
  shutil.copytree(folder, folder.with_name(name))


def _half_written(folder, rng):
  del rng
  shutil.copytree(
      folder, folder.with_name(f'{folder.name}.orbax-checkpoint-tmp')
  )


FOLDERS = (
    _delete_a_folder, _empty_a_folder, _empty_the_files, _file_instead,
    _rename, _copy, _half_written,
)  # fmt: skip


def damage_file(path: pathlib.Path, rng: random.Random) -> str:
  """Damages one file; returns a description of the damage."""
  text = path.suffix in ('.json', '.jsonl') or path.name == 'metadata'
  change = rng.choice(ANY + TEXT if text else ANY)
  change(path, rng)
  return change.__name__.removeprefix('_').replace('_', ' ')


def damage(folder: pathlib.Path, seed: int) -> str:
  """Damages a whole workdir in one place.

  Args:
    folder: The workdir, of a run with some checkpoints.
    seed: Determines the damage.

  Returns:
    A description of the damage.
  """
  rng = random.Random(seed)
  files = {kind: paths for kind, paths in _files(folder).items() if paths}
  kind = rng.choice([*files, 'folder'])
  if kind == 'folder':
    steps = sorted(
        p for p in (folder / 'checkpoints').rglob('*') if p.is_dir()
    )
    path = rng.choice([folder / 'checkpoints', *steps])
    change = rng.choice(FOLDERS)
    change(path, rng)
    how = change.__name__.removeprefix('_').replace('_', ' ')
  else:
    path = rng.choice(files[kind])
    how = damage_file(path, rng)
  return f'{how}: {path.relative_to(folder)}'
