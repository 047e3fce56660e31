"""Points in the plane, such as an embedding of features."""

from collections.abc import Mapping

import numpy as np

from fedjax_het.analysis.pictures import style


def draw_points(panels, path):
  """Plots points without axes, a row of panels for each way to colour them.

  Args:
    panels: {row: {title: {label: [n, 2]}}}; labels of a row share a legend.
    path: File to write; .png, .pdf or .svg.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no point, or the suffix is unknown.
  """
  path = style.check_path(path)
  style.import_matplotlib()
  labels = {
      row: [*dict.fromkeys(label for one in titles.values() for label in one)]
      for row, titles in panels.items()
  }
  if not any(labels.values()):
    raise ValueError('There is no point to draw: panels are empty.')
  looks = {row: style.looks_by_place(names) for row, names in labels.items()}
  names = [
      f'{title}, {row}' for row, titles in panels.items() for title in titles
  ]
  with style.drawing():
    figure, axes_of = style.panels_of(
        names, width=3.6, height=3.2, most=min(map(len, panels.values()))
    )
    for row, titles in panels.items():
      for title, series in titles.items():
        _draw_panel(axes_of[f'{title}, {row}'], series, looks[row])
    every = {k: v for one in looks.values() for k, v in one.items()}
    style.add_legend(figure, every, labels, lines=False)
    return style.save(figure, path)


def _draw_panel(axes, series: Mapping[str, np.ndarray], looks):
  for label, places in series.items():
    places = np.asarray(places)
    axes.plot(
        places[:, 0],
        places[:, 1],
        linestyle='',
        markersize=3.5,
        alpha=0.7,
        markeredgewidth=0,
        **style.marker_of(looks[label]),
    )
  axes.set_xticks([])
  axes.set_yticks([])
