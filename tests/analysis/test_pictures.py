"""Checks what the pictures show and how their files are written."""

import itertools
import pathlib
import re
import sys

import numpy as np
import pytest

from fedjax_het.analysis import pictures
from fedjax_het.analysis.pictures import style

pytest.importorskip('matplotlib')

LABELS = np.array([0] * 9 + [1] * 4 + [2] * 3)
PARTS = [np.arange(0, 9), np.arange(9, 13), np.array([13]), np.array([14, 15])]


@pytest.fixture
def figures(monkeypatch):
  """The figures that were saved, in order."""
  saved, save = [], style.save

  def keep(figure, path):
    saved.append(figure)
    return save(figure, path)

  monkeypatch.setattr(style, 'save', keep)
  return saved


@pytest.mark.parametrize(
    'suffix, start', [('png', b'\x89PNG'), ('pdf', b'%PDF'), ('svg', b'<?xml')]
)
def test_files_have_the_format_of_their_name(tmp_path, suffix, start):
  path = tmp_path / f'picture.{suffix}'
  assert pictures.draw_partition(LABELS, PARTS, path, title='A') == path
  assert path.read_bytes().startswith(start)
  pictures.draw_curves({'': {'a': ([1, 2], [0.1, 0.2])}}, path, 'Accuracy')
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
      {'Title': {'FedIN': (rounds, runs), 'Private': (rounds, runs[0])}},
      tmp_path / 'a.png',
      'Accuracy',
  )
  (axes,) = figures[0].axes
  mean, single = (line.get_xydata() for line in axes.lines)
  np.testing.assert_allclose(mean, [[1, 0.2], [5, 0.4], [9, 0.3]])
  np.testing.assert_allclose(single[:, 1], runs[0])
  (band,) = axes.collections
  edges = band.get_paths()[0].vertices
  at_five = edges[edges[:, 0] == 5, 1]
  deviation = runs[:, 1].std(ddof=1)  # As in tables.
  np.testing.assert_allclose(
      [at_five.min(), at_five.max()], [0.4 - deviation, 0.4 + deviation]
  )
  labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
  assert labels == ['FedIN', 'Private']
  assert axes.get_ylabel() == 'Accuracy'


def test_rounds_are_counted_in_ones_twos_fives_and_tens(tmp_path, figures):
  rounds = [0, 30, 60]
  pictures.draw_curves({'': {'a': (rounds, rounds)}}, tmp_path / 'a.png', 'y')
  ticks = np.diff(figures[0].axes[0].get_xticks())
  assert set(ticks) in ({10}, {20})


@pytest.mark.parametrize('numbers, scale', [
    ([3e-4, 3e-3], 'log'), ([8, 128], 'log'), ([0.0, 1.4], 'linear'),
    ([8, 64], 'linear'),
])  # fmt: skip
def test_marks_are_the_only_numbers_of_the_axis(
    tmp_path, figures, numbers, scale
):
  """A tenfold range is logarithmic."""
  pictures.draw_curves(
      {'': {'a': (numbers, [0.1, 0.2])}}, tmp_path / 'a.png', 'Accuracy',
      marks=numbers[::-1],
  )  # fmt: skip
  (axes,) = figures[0].axes
  assert axes.get_xscale() == scale
  assert axes.get_xticks().tolist() == numbers
  shown = [text.get_text() for text in axes.get_xticklabels()]
  assert shown == [f'{n:g}' for n in numbers]
  assert not len(axes.get_xticks(minor=True))


def test_many_marks_are_not_all_labelled(tmp_path, figures):
  numbers = np.geomspace(1e-4, 1e-1, 60)
  pictures.draw_curves(
      {'': {'a': (numbers, numbers)}}, tmp_path / 'a.png', 'Accuracy',
      marks=[*numbers],
  )  # fmt: skip
  (axes,) = figures[0].axes
  assert axes.get_xscale() == 'log' and len(axes.get_xticks()) <= 12


def test_curves_differ_in_more_than_colour(tmp_path, figures):
  series = {f'method {i}': ([1, 2], [0, i]) for i in range(10)}
  pictures.draw_curves({'': series}, tmp_path / 'a.png', 'Accuracy')
  lines = figures[0].axes[0].lines
  looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in lines}
  assert len(looks) == 10
  assert all(
      (a.get_linestyle(), a.get_marker()) != (b.get_linestyle(), b.get_marker())
      for a, b in itertools.pairwise(lines)
  )


def test_panels_are_columns_and_a_method_looks_alike_in_all(tmp_path, figures):
  series = {f'method {i}': ([1, 2], [0, i]) for i in range(14)}
  looks = pictures.looks_by_place(series)
  last = {'method 13': series['method 13']}
  pictures.draw_curves(
      {'IID': series, 'two labels': last}, tmp_path / 'a.png', 'Accuracy',
      looks=looks,
  )  # fmt: skip
  first, second = figures[0].axes
  assert [len(axes.lines) for axes in (first, second)] == [14, 1]
  assert [axes.get_title('left') for axes in figures[0].axes] == [
      'IID', 'two labels',
  ]  # fmt: skip
  for line in (first.lines[13], second.lines[0]):
    assert line.get_color() == looks['method 13'].colour
    assert line.get_marker() == looks['method 13'].marker
  named = [text.get_text() for text in figures[0].legends[0].get_texts()]
  assert named == list(series)
  assert figures[0].get_figheight() > 0.17 * len(series)  # None is cut off.


def test_a_wide_legend_leaves_the_panels_their_width(tmp_path, figures):
  def width(name):
    names = [name.format(i) for i in range(40)]
    series = {label: ([1, 2], [0, 1]) for label in names}
    pictures.draw_curves({'a': series, 'b': series}, tmp_path / 'a.png', 'y')
    return figures[-1].axes[0].get_position().width * figures[-1].get_figwidth()

  narrow, wide = width('{}'), width('a method of a very long name, {}')
  assert abs(wide - narrow) < 0.3 and wide > 2.5


def test_panels_without_a_common_label_are_listed_by_title(tmp_path, figures):
  panels = {'IID': {'a': ([1], [0])}, 'two labels': {'b': ([1], [0])}}
  pictures.draw_curves(panels, tmp_path / 'a.png', 'Accuracy')
  named = [text.get_text() for text in figures[0].legends[0].get_texts()]
  assert named == ['IID', 'a', 'two labels', 'b']


@pytest.mark.parametrize('title, lines', [
    ('a title of three words and five', ['a title of three words and five']),
    ('this title ends with a last word 0.5', [
        'this title ends with', 'a last word 0.5',
    ]),
    ('batch norm and 30 % wrong labels', [
        'batch norm and', '30 % wrong labels',
    ]),
    ('and ' + 30 * 'b', ['and', 30 * 'b']),
    (40 * 'b', [31 * 'b', 9 * 'b']),
    ('', ['']),
])  # fmt: skip
def test_lines_of_a_title_are_about_equally_long(title, lines):
  assert style.wrapped(title, 3.9).split('\n') == lines


@pytest.mark.parametrize('longest, shared', [(300, True), (301, False)])
def test_short_panels_are_not_drawn_on_a_long_axis(
    tmp_path, figures, longest, shared
):
  ends = {'long': longest, 'short': 100, 'a': 100, 'b': 100, 'c': 100}
  panels = {name: {'x': ([0, end], [0, 1])} for name, end in ends.items()}
  pictures.draw_curves(panels, tmp_path / 'a.png', 'Accuracy')
  long, short, *_ = figures[0].axes
  assert long.get_ylim() == short.get_ylim()
  assert (long.get_xlim() == short.get_xlim()) == shared
  for axes in (long, short):  # Of the upper row.
    assert axes.xaxis.get_tick_params()['labelbottom'] != shared
    assert not axes.get_xlabel()
  assert not short.yaxis.get_tick_params()['labelleft']


def _curve(high):
  return [0, 1], [high / 2, high]


def _dots(high):
  return {'cnn': [high], 'mlp': [high / 2]}


def _cost(high):
  return [1e6], [high]


@pytest.mark.parametrize('draw, series', [
    (lambda panels, path: pictures.draw_curves(panels, path, 'y'), _curve),
    (lambda panels, path: pictures.draw_dots(panels, path, 'y'), _dots),
    (lambda panels, path: pictures.draw_trade_off(panels, path, 'x', 'y'),
     _cost),
])  # fmt: skip
@pytest.mark.parametrize('low, shared', [(0.15, True), (0.14, False)])
def test_low_panels_have_a_y_axis_of_their_own(
    tmp_path, figures, draw, series, low, shared
):
  tops = {'high': 0.6, 'low': low, 'second': 0.5, 'lowest': 0.02, 'nan': np.nan}
  panels = {title: {'A': series(top)} for title, top in tops.items()}
  draw(panels, tmp_path / 'a.png')
  first, second, *others = figures[0].axes
  (third, lowest, nothing) = others
  assert first.get_ylim() == third.get_ylim() == nothing.get_ylim()
  assert lowest.get_ylim()[1] < 0.3 < first.get_ylim()[1]
  assert (second.get_ylim() == first.get_ylim()) == shared
  assert (second.get_ylim() == lowest.get_ylim()) != shared
  numbers = second.yaxis.get_tick_params()['labelleft']
  assert numbers != shared


def test_dots_stand_in_natural_order_with_the_tables_deviation(
    tmp_path, figures
):
  series = {
      'A': {'x10': [0.2, 0.4], 'x9': [0.5, 0.5]}, 'B': {'x9': [0.9, 0.7]},
  }  # fmt: skip
  pictures.draw_dots(
      {'': series}, tmp_path / 'a.png', 'Accuracy', percent=True
  )
  (axes,) = figures[0].axes
  assert [label.get_text() for label in axes.get_xticklabels()] == ['x9', 'x10']
  first, second = (
      dots.lines[0].get_xydata() for dots in axes.containers
  )
  np.testing.assert_allclose(first, [(-0.2, 0.5), (0.8, 0.3)])
  np.testing.assert_allclose(second, [(0.2, 0.8)])
  (bars,) = axes.containers[1].lines[2]
  low, high = bars.get_segments()[0][:, 1]
  np.testing.assert_allclose(high - low, 2 * np.std([0.9, 0.7], ddof=1))


def test_methods_that_none_beats_are_joined(tmp_path, figures):
  series = {
      'free': ([0], [0.5]), 'dear': ([2e6], [0.7]), 'worse': ([3e6], [0.6]),
      'same': ([[10, 1e3]], [0.5]),  # Of two groups.
  }  # fmt: skip
  pictures.draw_trade_off(
      {'': series, 'far': {'x': ([1e9], [0.1])}}, tmp_path / 'a.png', 'Bytes',
      'Accuracy',
  )  # fmt: skip
  axes, far = figures[0].axes
  assert far.get_xlim()[1] > 1e9  # The shared axis shows all points.
  assert axes.lines[0].get_xydata().tolist() == [[0, 0.5], [2e6, 0.7]]
  assert axes.get_xscale() == 'symlog'
  assert len(axes.containers) == 4
  (line,) = axes.containers[3].lines[2][:1]
  assert line.get_segments()[0][:, 0].tolist() == [10, 1e3]


def test_strips_have_a_dot_a_client_and_groups_in_order(tmp_path, figures):
  values = {'cnn10': [0.1, np.nan, 0.3], 'cnn2': [0.5, 0.9]}
  pictures.draw_strips({'All': values}, tmp_path / 'a.png', 'Accuracy')
  (axes,) = figures[0].axes
  assert [t.get_text() for t in axes.get_yticklabels()] == ['cnn2', 'cnn10']
  dots, mean, *_ = axes.lines
  np.testing.assert_allclose(dots.get_xdata(), [0.5, 0.9])
  np.testing.assert_allclose(mean.get_xdata(), [0.7, 0.7])
  np.testing.assert_allclose(axes.lines[2].get_xdata(), [0.1, 0.3])


def test_groups_have_one_colour_in_bubbles_curves_and_strips(tmp_path, figures):
  looks = pictures.group_looks(['cnn10', 'cnn2'])
  assert [*looks] == ['cnn2', 'cnn10']
  assert pictures.MEAN_LOOK.colour not in {x.colour for x in looks.values()}
  many = pictures.group_looks(map(str, range(40))).values()
  assert len({(x.colour, x.marker) for x in many}) == 40
  pictures.draw_partition(
      LABELS, PARTS, tmp_path / 'a.png', ['cnn10', 'cnn2', 'cnn10', 'cnn2']
  )
  bars = figures[0].axes[0].patches
  to_hex = style.import_matplotlib().colors.to_hex
  colours = {to_hex(bar.get_facecolor()).upper() for bar in bars}
  assert colours == {look.colour for look in looks.values()}


def test_places_and_variants_look_different():
  places = [pictures.look(i) for i in range(49)]
  assert len({(x.colour, x.marker) for x in places}) == 49
  # Private and FedIN share a colour and are often drawn in one picture.
  assert len({(x.colour, x.dash) for x in places[:28]}) == 28
  variants = [pictures.look(3, i) for i in range(12)]
  assert len(set(variants)) == 12
  # Parts of a small marker that is filled are hard to tell.
  assert len({variant.dash for variant in variants[:8]}) == 8
  assert len({x.colour for x in variants}) == 1
  assert len({x.marker for x in variants[:6]}) == 1
  # Dots have no dashes.
  assert len({(x.marker, x.fill) for x in variants}) == 12


def test_heat_maps_and_confusion_matrices(tmp_path, figures):
  maps = {'held': np.eye(3)[:, :2], 'known': np.full((3, 2), np.nan)}
  pictures.draw_heat_maps(maps, tmp_path / 'a.png')
  shown = figures[0].axes[0].images[0].get_array()
  np.testing.assert_array_equal(shown, np.eye(3)[:, :2].T)
  matrix = np.array([[0.25, 0.75], [0.0, 1.0]])
  pictures.draw_matrices(
      dict.fromkeys('abcde', matrix), [0, 1], tmp_path / 'b.png',
      downwards=True,
  )  # fmt: skip
  assert len(figures[1].axes) == 6  # With the colour bar.
  texts = [text.get_text() for text in figures[1].axes[0].texts]
  assert texts == ['25', '75', '100']
  with pytest.raises(ValueError, match='nothing to draw'):
    pictures.draw_heat_maps({}, tmp_path / 'a.png')


def test_a_notebooks_dark_style_changes_nothing(tmp_path):
  import matplotlib

  first, second = tmp_path / 'a.png', tmp_path / 'b.png'
  pictures.draw_curves({'': {'a': ([1], [1.0])}}, first, 'Accuracy')
  with matplotlib.style.context('dark_background'):
    pictures.draw_curves({'': {'a': ([1], [1.0])}}, second, 'Accuracy')
  assert first.read_bytes() == second.read_bytes()


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
  pictures.draw_curves({'': {'a': ([1], [1.0])}}, tmp_path / 'a.png', 'Acc')
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
  with pytest.raises(ValueError, match='panels are empty'):
    pictures.draw_curves({}, path, 'Accuracy')
  with pytest.raises(ValueError, match='no dot to draw'):
    pictures.draw_dots({'': {'a': {}}}, path, 'Accuracy')
  with pytest.raises(ValueError, match=r"'a': rounds of shape \(2,\)"):
    pictures.draw_curves({'': {'a': ([1, 2], [1.0])}}, path, 'Accuracy')
  assert not list(tmp_path.iterdir())


def test_the_drawing_of_a_round_has_the_same_palette():
  root = pathlib.Path(__file__).resolve().parents[2]
  text = (root / 'docs' / 'images' / 'round.svg').read_text()
  found = set(re.findall('fill="(#[0-9a-fA-F]{6})"', text))
  blocks = found - {'#ffffff', '#f6f7fb'}
  assert len(blocks) == 5 and blocks <= set(pictures.COLOURS)
