"""How all pictures look, and how their files are written.

Colours are Okabe and Ito's palette, which is safe for colour-blind readers;
markers repeat the information. Figures are built without pyplot and from
matplotlib's defaults, so they need no display, change no global state, and do
not take over the style of a notebook: on a dark page, too, they are white.
"""

from collections.abc import Iterable, Iterator
import contextlib
import os
import pathlib
import re
import tempfile
import textwrap
from typing import NamedTuple

import numpy as np

# Without yellow, which has low contrast on white; black last.
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
_FILLS = ('full', 'none', 'left', 'top', 'right', 'bottom')
_SUFFIXES = ('.png', '.pdf', '.svg')
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
    colour: As '#0072B2'.
    marker: A marker of matplotlib.
    dash: The line's style.
    fill: Which part of the marker is filled.
  """

  colour: str
  marker: str
  dash: str = '-'
  fill: str = 'full'


def look(place: int, variant: int = 0) -> Look:
  """The look of what has a place in some fixed order.

  Args:
    place: From 0; 49 places differ in colour or marker, and those of one
      colour in dashes, too.
    variant: From 0; variants share colour and marker, and differ in dashes and
      in what of the marker is filled.

  Returns:
    The look.
  """
  return Look(
      COLOURS[place % len(COLOURS)],
      MARKERS[(place + place // len(COLOURS)) % len(MARKERS)],
      _DASHES[(variant + place // len(COLOURS)) % len(_DASHES)],
      _FILLS[(variant + variant // len(_DASHES)) % len(_FILLS)],
  )


def looks_by_place(names: Iterable[str]) -> dict[str, Look]:
  """The looks of names by their order, where no other order is known.

  Args:
    names: Labels.

  Returns:
    {name: look}; dashes differ, too, since nothing else tells them apart.
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


def natural_key(name):
  """Key that sorts 'cnn2' before 'cnn10'."""
  pieces = re.split(r'(\d+)', str(name))
  return [(int(p), '') if p.isdigit() else (-1, p) for p in pieces]


def deviation(values, axis=None):
  """The sample deviation of tables, 0 for a single value."""
  values = np.asarray(values, float)
  count = values.size if axis is None else values.shape[axis]
  return values.std(axis=axis, ddof=1 if count > 1 else 0)


def import_matplotlib():
  """Matplotlib with the parts that pictures use.

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
  """The style of all pictures, whatever style the user has set.

  Yields:
    Nothing.
  """
  with import_matplotlib().style.context(['default', _STYLE]):
    yield


def shades():
  """A colour map from white to the palette's blue; grey where there is NaN."""
  matplotlib = import_matplotlib()
  shades = matplotlib.colors.LinearSegmentedColormap.from_list(
      'shades', ['#ffffff', '#56B4E9', '#0072B2', '#003a5d']
  )
  return shades.with_extremes(bad='#d0d0d0')


def panels_of(names, *, width=None, height=None, most=3):
  """A figure with a titled panel a name, in rows of at most `most`.

  Args:
    names: Titles of the panels; '' for none.
    width: Inches of a panel; None for smaller ones where there are several.
    height: Likewise.
    most: Panels in a row.

  Returns:
    The figure and {name: axes}. Axes are shared.
  """
  matplotlib = import_matplotlib()
  columns = 2 if len(names) == 4 else min(len(names), most)
  rows = -(-len(names) // columns)
  width = width or (5.2 if columns == 1 else 3.6)
  height = height or (4.2 if columns == 1 else 3.0)
  figure = matplotlib.figure.Figure(
      figsize=(width * columns + 2.0, max(height * rows, 2.2)),
      layout='constrained',
  )
  grid = list(
      figure.subplots(
          rows, columns, sharex=True, sharey=True, squeeze=False
      ).flat
  )
  axes = dict(zip(names, grid, strict=False))
  for name, one in axes.items():
    if name:
      # About 12 characters of a title fit into an inch; legends take some.
      lines = textwrap.wrap(name, max(24, int(8 * width)))
      one.set_title('\n'.join(lines), loc='left')
  for one in grid[len(names) :]:
    one.remove()
  return figure, axes


def name_axes(axes, **labels) -> None:
  """Labels the x and y axes of panels where no neighbour says the same.

  Args:
    axes: All panels, in order.
    **labels: `xlabel` and `ylabel`.
  """
  for i, one in enumerate(axes):
    one.set(**labels)
    one.label_outer()
    if i + one.get_gridspec().ncols >= len(axes):  # There is none below.
      one.set(xlabel=labels.get('xlabel', ''))
      one.tick_params(labelbottom=True)


def add_legend(figure, looks, panels, *, lines: bool) -> None:
  """One legend for all panels, beside them.

  Panels that have no label in common are listed below their titles.

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
  figure.legend(
      handles=handles, loc='outside right upper', handlelength=2.8,
      ncols=columns,
  )  # fmt: skip


def marker_of(look: Look) -> dict[str, str]:
  """Options of matplotlib for a series of a look."""
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
  """The path of a picture.

  Args:
    path: Its path.

  Returns:
    It as a pathlib.Path.

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
  """Writes to a temporary file and renames it, so `path` is never partial."""
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
