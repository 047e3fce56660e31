"""Checks what the pictures show and how their files are written."""

import itertools
import sys

import numpy as np
import pytest

from fedjax_het.analysis import pictures

pytest.importorskip('matplotlib')

LABELS = np.array([0] * 9 + [1] * 4 + [2] * 3)
PARTS = [np.arange(0, 9), np.arange(9, 13), np.array([13]), np.array([14, 15])]


@pytest.fixture
def figures(monkeypatch):
  """The figures that were saved, in order."""
  saved, save = [], pictures._save

  def keep(figure, path):
    saved.append(figure)
    return save(figure, path)

  monkeypatch.setattr(pictures, '_save', keep)
  return saved


@pytest.mark.parametrize(
    'suffix, start', [('png', b'\x89PNG'), ('pdf', b'%PDF'), ('svg', b'<?xml')]
)
def test_files_have_the_format_of_their_name(tmp_path, suffix, start):
  path = tmp_path / f'picture.{suffix}'
  assert pictures.draw_partition(LABELS, PARTS, path, title='A') == path
  assert path.read_bytes().startswith(start)
  pictures.draw_curves({'a': ([1, 2], [0.1, 0.2])}, path, 'Accuracy')
  assert path.read_bytes().startswith(start)
  assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_bubbles_have_areas_in_proportion_to_counts(tmp_path, figures):
  pictures.draw_partition(LABELS, PARTS, tmp_path / 'a.png')
  top, bubbles = figures[0].axes
  (points,) = bubbles.collections
  areas = {
      (int(x), int(y)): area
      for (x, y), area in zip(
          points.get_offsets(), points.get_sizes(), strict=True
      )
  }
  unit = areas[2, 2]
  want = {(0, 0): 9, (1, 1): 4, (2, 2): 1, (3, 2): 2}
  assert areas.keys() == want.keys()
  for place, count in want.items():
    np.testing.assert_allclose(areas[place], count * unit, rtol=1e-6)
  assert [bar.get_height() for bar in top.patches] == [9, 4, 1, 2]


def test_groups_have_their_own_colours_in_order_of_name(tmp_path, figures):
  pictures.draw_partition(
      LABELS, PARTS, tmp_path / 'a.png', ['cnn10', 'cnn2', 'cnn10', 'cnn2']
  )
  groups = figures[0].axes[1].collections
  assert [group.get_label() for group in groups] == ['cnn2', 'cnn10']
  clients = [set(group.get_offsets()[:, 0].tolist()) for group in groups]
  assert clients == [{1.0, 3.0}, {0.0, 2.0}]
  colours = [tuple(group.get_facecolor()[0]) for group in groups]
  assert colours[0] != colours[1]
  legends = [legend.get_title().get_text() for legend in figures[0].legends]
  assert legends == ['Examples', 'Group']


def test_more_groups_than_colours_differ_in_shape(tmp_path, figures):
  labels = np.zeros(20, int)
  parts = [np.array([i]) for i in range(20)]
  pictures.draw_partition(labels, parts, tmp_path / 'a.png', list(range(20)))
  looks = {
      (tuple(group.get_facecolor()[0]), group.get_paths()[0].vertices.tobytes())
      for group in figures[0].axes[1].collections
  }
  assert len(looks) == 20


@pytest.mark.parametrize('num_clients', [1, 10, 100, 500])
def test_pictures_stay_of_a_size_to_look_at(tmp_path, figures, num_clients):
  labels = np.arange(1000) % 10
  parts = np.array_split(np.arange(1000), num_clients)
  pictures.draw_partition(labels, parts, tmp_path / 'a.svg')
  width, height = figures[0].get_size_inches()
  assert 3 < width < 23 and 3 < height < 8
  axis = figures[0].axes[1].xaxis
  assert len(axis.get_majorticklocs()) <= 20


def test_a_curve_of_several_runs_is_mean_and_deviation(tmp_path, figures):
  rounds = np.array([1, 5, 9])
  runs = np.array([[0.1, 0.2, 0.3], [0.3, 0.6, 0.3]])
  pictures.draw_curves(
      {'FedIN': (rounds, runs), 'Private': (rounds, runs[0])},
      tmp_path / 'a.png',
      'Accuracy',
      'Title',
  )
  (axes,) = figures[0].axes
  mean, single = (line.get_xydata() for line in axes.lines)
  np.testing.assert_allclose(mean, [[1, 0.2], [5, 0.4], [9, 0.3]])
  np.testing.assert_allclose(single[:, 1], runs[0])
  (band,) = axes.collections
  edges = band.get_paths()[0].vertices
  at_five = edges[edges[:, 0] == 5, 1]
  np.testing.assert_allclose([at_five.min(), at_five.max()], [0.2, 0.6])
  labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
  assert labels == ['FedIN', 'Private']
  assert axes.get_ylabel() == 'Accuracy'


def test_curves_differ_in_more_than_colour(tmp_path, figures):
  series = {f'method {i}': ([1, 2], [0, i]) for i in range(10)}
  pictures.draw_curves(series, tmp_path / 'a.png', 'Accuracy')
  lines = figures[0].axes[0].lines
  looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in lines}
  assert len(looks) == 10
  assert all(
      (a.get_linestyle(), a.get_marker()) != (b.get_linestyle(), b.get_marker())
      for a, b in itertools.pairwise(lines)
  )


def test_many_curves_are_split_over_panels(tmp_path, figures):
  series = {f'method {i}': ([1, 2], [0, i]) for i in range(24)}
  pictures.draw_curves(series, tmp_path / 'a.png', 'Accuracy', 'Title')
  panels = figures[0].axes
  assert [len(axes.lines) for axes in panels] == [8, 8, 8]
  named = [t.get_text() for a in panels for t in a.get_legend().get_texts()]
  assert named == list(series) and not figures[0].legends
  assert [axes.get_xlabel() for axes in panels] == ['', '', 'Round']


def test_bars_stand_at_their_names_with_means_over_runs(tmp_path, figures):
  series = {'A': {'x': [0.2, 0.4], 'y': [0.5, 0.5]}, 'B': {'y': [0.9, 0.7]}}
  pictures.draw_bars(series, tmp_path / 'a.png', 'Accuracy', percent=True)
  (axes,) = figures[0].axes
  first, second = (
      [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars]
      for bars in axes.containers
      if hasattr(bars, 'patches')
  )
  np.testing.assert_allclose(first, [(-1 / 6, 0.3), (5 / 6, 0.5)])
  np.testing.assert_allclose(second, [(7 / 6, 0.8)])
  assert [label.get_text() for label in axes.get_xticklabels()] == ['x', 'y']


def test_a_failed_drawing_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'a.png'
  pictures.draw_partition(LABELS, PARTS, path)
  before = path.read_bytes()

  def fail(self, file, **options):
    file.write(b'half a picture')
    raise OSError('No space left on device')

  monkeypatch.setattr('matplotlib.figure.Figure.savefig', fail)
  with pytest.raises(OSError, match='No space left'):
    pictures.draw_partition(LABELS, PARTS, path)
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match='pip install matplotlib'):
    pictures.draw_partition(LABELS, PARTS, tmp_path / 'a.png')


def test_drawing_leaves_global_settings_alone(tmp_path):
  import matplotlib

  before = dict(matplotlib.rcParams)
  pictures.draw_curves({'a': ([1], [1.0])}, tmp_path / 'a.png', 'Accuracy')
  assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_drawn_is_refused(tmp_path):
  path = tmp_path / 'a.png'
  with pytest.raises(ValueError, match=r"a.txt'.* must end in one of .png"):
    pictures.draw_partition(LABELS, PARTS, tmp_path / 'a.txt')
  with pytest.raises(FileNotFoundError, match=r'No such folder.*missing'):
    pictures.draw_partition(LABELS, PARTS, tmp_path / 'missing' / 'a.png')
  with pytest.raises(ValueError, match='names 2 clients, but there are 4'):
    pictures.draw_partition(LABELS, PARTS, path, ['a', 'b'])
  with pytest.raises(ValueError, match='parts is empty'):
    pictures.draw_partition(LABELS, [], path)
  with pytest.raises(ValueError, match='series is empty'):
    pictures.draw_curves({}, path, 'Accuracy')
  with pytest.raises(ValueError, match='no bar to draw'):
    pictures.draw_bars({'a': {}}, path, 'Accuracy')
  with pytest.raises(ValueError, match=r"'a': rounds of shape \(2,\)"):
    pictures.draw_curves({'a': ([1, 2], [1.0])}, path, 'Accuracy')
  assert not list(tmp_path.iterdir())
