"""Dots with intervals for methods and models, and dots for single clients."""

from collections.abc import Mapping

import numpy as np

from fedjax_het.analysis.pictures import style
from fedjax_het.names import natural_key


def draw_dots(
    panels,
    path,
    ylabel,
    *,
    looks: Mapping[str, style.Look] | None = None,
    percent=False,
):
  """Plots a dot with its interval for each name and label.

  The y axis does not begin at zero, so that small differences are visible.
  Panels share it, but for those with less than a quarter of the highest value.

  Args:
    panels: {title: {label: {name: values}}}, a panel for each title; values
      are [S] for S runs, plotted as mean and +- one sample deviation. Names
      are on the x axis in natural order; a label may lack some of them.
    path: File to write; .png, .pdf or .svg.
    ylabel: Label of the y axis.
    looks: {label: look} of all labels; None for looks in the order of labels.
    percent: Whether to print values in [0, 1] as percentages.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no dot, or the suffix is unknown.
  """
  path = style.check_path(path)
  style.import_matplotlib()
  every = [dots for series in panels.values() for dots in series.values()]
  names = sorted({n for dots in every for n in dots}, key=natural_key)
  if not names:
    raise ValueError('There is no dot to draw: panels are empty.')
  labels = [*dict.fromkeys(s for series in panels.values() for s in series)]
  looks = looks or style.looks_by_place(labels)
  with style.drawing():
    width = 1.2 + len(names) * max(0.45, 0.09 * len(labels))
    figure, axes_of = style.panels_of(
        [*panels], width=max(width, 4.0), most=1 if width > 5 else 3,
        low=style.low_panels(_means(panels)),
    )  # fmt: skip
    step = 0.8 / len(labels)
    for title, axes in axes_of.items():
      for i, label in enumerate(labels):
        dots = panels[title].get(label, {})
        shift = (i - (len(labels) - 1) / 2) * step
        _draw_dots(axes, dots, names, shift, looks[label], label)
      _name_places(axes, names)
      if percent:
        style.percents(axes.yaxis)
    style.name_axes([*axes_of.values()], ylabel=ylabel)
    style.add_legend(figure, looks, panels, lines=False)
    return style.save(figure, path)


def _means(panels):
  return {
      title: [np.mean(v) for dots in series.values() for v in dots.values()]
      for title, series in panels.items()
  }


def _draw_dots(axes, dots, names, shift, look, label):
  mine = [name for name in names if name in dots]
  axes.errorbar(
      np.array([names.index(name) for name in mine], float) + shift,
      [np.mean(dots[name]) for name in mine],
      [style.deviation(dots[name]) for name in mine],
      linestyle='',
      markersize=5,
      elinewidth=1.2,
      label=str(label),
      **style.marker_of(look),
  )


def _name_places(axes, names):
  """Puts the names on the x axis, and lines between them."""
  long = max(map(len, names)) > 6 and len(names) > 3
  axes.set_xticks(
      range(len(names)),
      names,
      rotation=30 if long else 0,
      ha='right' if long else 'center',
  )
  axes.set_xlim(-0.6, len(names) - 0.4)
  axes.grid(True, axis='y')
  for place in range(1, len(names)):
    axes.axvline(place - 0.5, color='#e4e4e4', linewidth=0.6)


def draw_strips(
    panels,
    path,
    xlabel,
    *,
    looks: Mapping[str, style.Look] | None = None,
    percent: bool = True,
):
  """Plots each client's result as a dot, a row for each group.

  Args:
    panels: {title: {group: [E] numbers}}, a panel for each title; NaNs are not
      drawn. A vertical line marks a group's mean.
    path: File to write; .png, .pdf or .svg.
    xlabel: Label of the x axis.
    looks: {group: look}; None for those of `group_looks`.
    percent: Whether to print values in [0, 1] as percentages.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no client, or the suffix is unknown.
  """
  path = style.check_path(path)
  style.import_matplotlib()
  names = {name for series in panels.values() for name in series}
  if not names:
    raise ValueError('There is no client to draw: panels are empty.')
  looks = looks or style.group_looks(names)
  groups = sorted(names, key=natural_key)
  with style.drawing():
    figure, axes_of = style.panels_of(
        [*panels], width=4.6, height=1.1 + 0.34 * len(groups), most=2
    )
    for title, axes in axes_of.items():
      for row, group in enumerate(groups):
        values = np.asarray(panels[title].get(group, ()), float)
        values = values[np.isfinite(values)]
        _draw_strip(axes, row, values, looks[group])
      axes.set(ylim=(len(groups) - 0.4, -0.6))
      axes.set_yticks(range(len(groups)), groups)
      axes.grid(True, axis='x')
      if percent:
        style.percents(axes.xaxis)
    style.name_axes([*axes_of.values()], xlabel=xlabel)
    return style.save(figure, path)


def _draw_strip(axes, row, values, look):
  """Draws a row of dots, shifted by a fixed pattern so that few overlap."""
  if not len(values):
    return
  shift = 0.22 * (np.arange(len(values)) * 0.618 % 1 * 2 - 1)
  axes.plot(
      np.sort(values),
      row + (shift if len(values) > 1 else np.zeros(1)),
      linestyle='',
      markersize=4,
      alpha=0.75,
      markeredgewidth=0,
      **style.marker_of(look),
  )
  axes.plot([values.mean()] * 2, [row - 0.36, row + 0.36], color='black')
