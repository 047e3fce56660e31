"""The style of all pictures, and how their files are written.

Colours are Okabe and Ito's palette, which is safe for colour-blind readers;
markers repeat the information. Figures are built without pyplot and from
matplotlib's defaults, so they need no display, change no global state, and
ignore a notebook's style: they stay white on a dark page.
"""

from collections.abc import Iterable, Iterator
import contextlib
import os
import pathlib
import tempfile
import textwrap
from typing import NamedTuple

import numpy as np

from fedjax_het.names import natural_key

# The palette without yellow, which has low contrast on white; black is last.
COLOURS = (
    '#0072B2',
    '#D55E00',
    '#009E73',
    '#CC79A7',
    '#56B4E9',
    '#E69F00',
    '#000000',
)
# Black is for the mean over groups.
GROUP_COLOURS = COLOURS[:-1]
MARKERS = ('o', 's', 'D', '^', 'v', 'P', 'X')
GREY = '#6b6b6b'
_DASHES = ('-', '--', '-.', ':')
# Offset, then points of line and gap, of more rows of one method.
_MORE_DASHES = (
    (0, (9, 3)), (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (3, 1, 3, 3)),
)  # fmt: skip
_FILLS = ('full', 'none', 'left', 'top', 'right', 'bottom')
_SUFFIXES = ('.png', '.pdf', '.svg')
# Panels share their y axis up to this ratio of their highest values.
_HIGHEST = 4
# Width of a figure beside its panels, for a legend, in inches.
_LEGEND = 2.0
_STYLE = {
    'axes.axisbelow': True,
    'axes.edgecolor': GREY,
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.titlesize': 11,
    'axes.titleweight': 'bold',
    'font.size': 9,
    'grid.color': '#e4e4e4',
    'grid.linewidth': 0.6,
    'legend.frameon': False,
    'svg.hashsalt': 'fedjax_het',
    'xtick.color': GREY,
    'xtick.labelcolor': 'black',
    'ytick.color': GREY,
    'ytick.labelcolor': 'black',
}


class Look(NamedTuple):
  """How one series is drawn, in every picture.

  Attributes:
    colour: Hexadecimal code, such as '#0072B2'.
    marker: A marker of matplotlib.
    dash: The line's style, as matplotlib takes it.
    fill: Which part of the marker is filled.
  """

  colour: str
  marker: str
  dash: str | tuple[int, tuple[int, ...]] = '-'
  fill: str = 'full'


def look(place: int, variant: int = 0) -> Look:
  """The look of a place in a fixed order, such as that of methods.

  Args:
    place: From 0. The first 49 places differ in colour or marker; dashes
      change when colours repeat.
    variant: From 0. Variants share the colour and differ in dashes. The first
      six share the marker, too, and differ in how it is filled; the next six
      have the next marker.

  Returns:
    The look.
  """
  turn, variety = divmod(variant, len(_DASHES))
  other, fill = divmod(variant, len(_FILLS))
  dashes = _MORE_DASHES if turn % 2 else _DASHES
  return Look(
      COLOURS[place % len(COLOURS)],
      MARKERS[(place + place // len(COLOURS) + other) % len(MARKERS)],
      dashes[(variety + place // len(COLOURS)) % len(dashes)],
      _FILLS[fill],
  )


def looks_by_place(names: Iterable[str]) -> dict[str, Look]:
  """The looks of names in the given order.

  Args:
    names: Labels.

  Returns:
    {name: look}; consecutive names also differ in dashes.
  """
  return {
      name: look(i)._replace(dash=_DASHES[i % len(_DASHES)])
      for i, name in enumerate(dict.fromkeys(names))
  }


def group_looks(names: Iterable[str]) -> dict[str, Look]:
  """The looks of groups, the same in every picture of a run.

  Args:
    names: All groups of the run.

  Returns:
    {group: look} in natural order: 'cnn2' comes before 'cnn10'.
  """
  ordered = sorted(set(names), key=natural_key)
  count = len(GROUP_COLOURS)
  return {
      name: Look(
          GROUP_COLOURS[i % count],
          MARKERS[(i % count + i // count) % len(MARKERS)],
          _DASHES[i % len(_DASHES)],
      )
      for i, name in enumerate(ordered)
  }


MEAN_LOOK = Look(COLOURS[-1], MARKERS[-1])


def deviation(values, axis=None):
  """The sample standard deviation (ddof = 1), as in tables; 0 for one value."""
  values = np.asarray(values, float)
  count = values.size if axis is None else values.shape[axis]
  return values.std(axis=axis, ddof=1 if count > 1 else 0)


def import_matplotlib():
  """Imports matplotlib and the submodules that pictures use.

  Returns:
    The module.

  Raises:
    ImportError: If it is not installed.
  """
  try:
    import matplotlib
    import matplotlib.colors
    import matplotlib.figure
    import matplotlib.lines
    import matplotlib.style
    import matplotlib.ticker
  except ImportError as error:
    raise ImportError(
        'Pictures need matplotlib: pip install matplotlib.'
    ) from error
  return matplotlib


@contextlib.contextmanager
def drawing() -> Iterator[None]:
  """Context with the style of all pictures, whatever style the user has set.

  Yields:
    Nothing.
  """
  with import_matplotlib().style.context(['default', _STYLE]):
    yield


def shades():
  """A colour map from white to the palette's blue, with grey for NaN."""
  matplotlib = import_matplotlib()
  shades = matplotlib.colors.LinearSegmentedColormap.from_list(
      'shades', ['#ffffff', '#56B4E9', '#0072B2', '#003a5d']
  )
  return shades.with_extremes(bad='#d0d0d0')


def panels_of(
    names, *, width=None, height=None, most=3, sharex=True, low=frozenset()
):
  """Creates a figure with one titled panel per name.

  Args:
    names: Titles of the panels; '' for none.
    width: Width of a panel in inches; None for a default that is smaller if
      there are several in a row.
    height: Height of a panel; None likewise.
    most: Largest number of panels in a row.
    sharex: Whether the panels share their x axis.
    low: Names of the panels that share a y axis of their own, as from
      `low_panels`; the others share theirs.

  Returns:
    The figure and {name: axes}.
  """
  matplotlib = import_matplotlib()
  columns = 2 if len(names) == 4 else min(len(names), most)
  rows = -(-len(names) // columns)
  width = width or (5.2 if columns == 1 else 3.6)
  height = height or (4.2 if columns == 1 else 3.0)
  figure = matplotlib.figure.Figure(
      figsize=(width * columns + _LEGEND, max(height * rows, 2.2)),
      layout='constrained',
  )
  grid = list(
      figure.subplots(
          rows, columns, sharex=sharex, sharey=not low, squeeze=False
      ).flat
  )
  axes = dict(zip(names, grid, strict=False))
  firsts: dict[bool, str] = {}
  for name, one in axes.items():
    first = firsts.setdefault(name in low, name)
    if low and name != first:
      one.sharey(axes[first])
    if name:
      one.set_title(wrapped(name, max(3, width)), loc='left')
  for one in grid[len(names) :]:
    one.remove()
  return figure, axes


def low_panels(values) -> frozenset[str]:
  """The panels whose values would be hard to read on the y axis of the others.

  Args:
    values: {title: numbers of the panel}; NaNs do not count.

  Returns:
    The titles of panels whose largest number is less than a quarter of
    the largest of all, as one data set's accuracies may be beside another's.
  """
  tops = {}
  for title, numbers in values.items():
    numbers = np.fromiter(numbers, float)
    tops[title] = np.max(numbers[np.isfinite(numbers)], initial=-np.inf)
  most = max(tops.values(), default=0)
  return frozenset(
      title for title, top in tops.items() if 0 <= _HIGHEST * top < most
  )


def wrapped(title: str, width: float) -> str:
  """Breaks a title into lines for a panel of a width in inches."""
  # No line begins with a percent sign.
  title = title.replace(' %', '\u00a0%')
  # An inch fits about 12 characters; legends take some of the width.
  most = int(8 * width)
  count = len(textwrap.wrap(title, most))
  # The shortest lines of the same number, so that no single word is the last.
  shortest = max(1, *map(len, title.split(' ')))
  while most > shortest and len(textwrap.wrap(title, most - 1)) <= count:
    most -= 1
  return '\n'.join(textwrap.wrap(title, most)).replace('\u00a0', ' ')


def name_axes(axes, **labels) -> None:
  """Labels the x axes of the lowest panels and the y axes of the leftmost.

  A panel that shares its x axis with none keeps its numbers, as one does whose
  y axis is not that of the panel on its left.

  Args:
    axes: All panels, in order.
    **labels: `xlabel` and `ylabel`.
  """
  for i, one in enumerate(axes):
    one.set(**labels)
    one.label_outer()
    columns = one.get_gridspec().ncols
    lowest = i + columns >= len(axes)
    alone = len(one.get_shared_x_axes().get_siblings(one)) == 1
    if lowest:
      one.set(xlabel=labels.get('xlabel', ''))
    if lowest or alone:
      one.tick_params(labelbottom=True)
    if i % columns and not one.get_shared_y_axes().joined(one, axes[i - 1]):
      one.tick_params(labelleft=True)


def add_legend(figure, looks, panels, *, lines: bool) -> None:
  """Adds one legend for all panels, beside them.

  If no two panels share a label, the legend lists labels under their panel's
  title.

  Args:
    figure: The figure.
    looks: {label: look}.
    panels: {title: labels}, in the order of the legend.
    lines: Whether the series are lines with markers, not markers alone.
  """
  matplotlib = import_matplotlib()
  def entry(label):
    return matplotlib.lines.Line2D(
        [],
        [],
        label=str(label),
        linestyle=looks[label].dash if lines else '',
        linewidth=1.8,
        markersize=4 if lines else 6,
        **marker_of(looks[label]),
    )

  every = [label for labels in panels.values() for label in labels]
  if len(panels) > 1 and len(set(every)) == len(every):
    handles = []
    for title, labels in panels.items():
      heading = matplotlib.lines.Line2D([], [], linestyle='', label=title)
      handles += [heading, *map(entry, labels)]
  else:
    handles = [entry(label) for label in dict.fromkeys(every)]
  columns = -(-len(handles) // 30)
  # An entry is 0.18 inches high.
  least = 0.18 * -(-len(handles) // columns) + 0.3
  figure.set_figheight(max(figure.get_figheight(), least))
  legend = figure.legend(
      handles=handles, loc='outside right upper', handlelength=2.8,
      ncols=columns,
  )  # fmt: skip
  # A wide legend widens the figure, not to take the panels' width.
  wide = legend.get_window_extent().width / figure.dpi
  figure.set_figwidth(figure.get_figwidth() + max(0, wide - _LEGEND))


def marker_of(look: Look) -> dict[str, str]:
  """Matplotlib's options for the colour and marker of a look."""
  return dict(
      color=look.colour,
      marker=look.marker,
      fillstyle=look.fill,
      markerfacecoloralt='white',
  )


def percents(axis) -> None:
  """Prints the values in [0, 1] of an axis as percentages."""
  axis.set_major_formatter(
      import_matplotlib().ticker.PercentFormatter(1.0)
  )


def check_path(path) -> pathlib.Path:
  """Checks the path of a picture.

  Args:
    path: The path.

  Returns:
    The path as a pathlib.Path.

  Raises:
    FileNotFoundError: If the folder does not exist.
    ValueError: If the suffix is unknown.
  """
  path = pathlib.Path(path)
  if path.suffix not in _SUFFIXES:
    raise ValueError(
        f'Cannot draw to {str(path)!r}: the name must end in one of '
        f'{", ".join(_SUFFIXES)}.'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(f'No such folder to draw into: {path.parent}')
  return path


def save(figure, path: pathlib.Path) -> pathlib.Path:
  """Writes to a temporary file and renames it; `path` is never partial."""
  handle, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
  try:
    with os.fdopen(handle, 'wb') as file:
      figure.savefig(file, format=path.suffix[1:], dpi=150)
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise
  return path
