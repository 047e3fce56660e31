"""Matrices of values in [0, 1]: similarities, confusion, clients by classes."""

import numpy as np

from fedjax_het.analysis.pictures import style

# Largest numbers of panels in a row, of matrix rows if cells show numbers, and
# of matrix rows if all of them are named.
_MOST_PANELS, _MOST_NUMBERS, _MOST_NAMES = 4, 12, 40


def draw_matrices(
    matrices,
    names,
    path,
    *,
    xlabel='',
    ylabel='',
    downwards=False,
    columns: int = _MOST_PANELS,
):
  """Plots square matrices of values in [0, 1] side by side.

  Args:
    matrices: {title: [N, N]}; NaN is grey.
    names: The N names of rows and columns.
    path: File to write; .png, .pdf or .svg.
    xlabel: What the columns are.
    ylabel: What the rows are.
    downwards: Whether the first row is on top, as in confusion matrices. Cells
      then show percentages if N is at most 12.
    columns: Matrices in a row, at most.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no matrix, or the suffix is unknown.
  """
  path = style.check_path(path)
  matplotlib = style.import_matplotlib()
  if not matrices:
    raise ValueError('There is nothing to draw: matrices is empty.')
  columns = min(len(matrices), columns)
  rows = -(-len(matrices) // columns)
  numbers = downwards and len(names) <= _MOST_NUMBERS
  named = len(names) <= _MOST_NAMES
  side = 1.2 + 0.28 * len(names) if named else 5.0
  with style.drawing():
    figure = matplotlib.figure.Figure(
        figsize=(columns * side + 1.6, rows * side + 0.6),
        layout='compressed',
    )
    every = figure.subplots(
        rows, columns, sharex=True, sharey=True, squeeze=False
    ).flatten()
    for axes in every[len(matrices) :]:
      axes.remove()
    every = every[: len(matrices)]
    for axes, (title, matrix) in zip(every, matrices.items(), strict=True):
      image = axes.imshow(
          matrix, style.shades(), vmin=0, vmax=1,
          origin='upper' if downwards else 'lower',
      )  # fmt: skip
      axes.set_title(style.wrapped(title, side), loc='left')
      if named:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
      if numbers:
        _print_percents(axes, np.asarray(matrix))
    style.name_axes(every, xlabel=xlabel, ylabel=ylabel)
    bar = figure.colorbar(image, ax=every.tolist(), shrink=0.8)
    if downwards:
      style.percents(bar.ax.yaxis)
    return style.save(figure, path)


def _print_percents(axes, matrix):
  """Prints whole percentages in the cells, except for 0."""
  for (row, column), value in np.ndenumerate(matrix):
    if value >= 0.005:
      axes.text(
          column, row, f'{100 * value:.0f}', ha='center', va='center',
          fontsize=6, color='white' if value > 0.55 else 'black',
          in_layout=False,  # Measuring each text would slow the layout.
      )  # fmt: skip


def draw_heat_maps(panels, path):
  """Plots maps of clients by classes, one above the other.

  Args:
    panels: {title: [K, C]}, values in [0, 1] of K clients and C classes; NaN
      is grey. Maps may differ in K.
    path: File to write; .png, .pdf or .svg.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no map, or the suffix is unknown.
  """
  path = style.check_path(path)
  matplotlib = style.import_matplotlib()
  if not panels:
    raise ValueError('There is nothing to draw: panels are empty.')
  clients, classes = np.max([np.shape(m) for m in panels.values()], axis=0)
  width = np.clip(0.22 * clients, 4.0, 14.0)
  height = np.clip(0.2 * classes, 1.4, 5.0)
  with style.drawing():
    figure = matplotlib.figure.Figure(
        figsize=(width + 1.8, (height + 0.7) * len(panels)),
        layout='constrained',
    )
    every = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, values) in zip(every, panels.items(), strict=True):
      image = axes.imshow(
          np.ma.masked_invalid(np.transpose(values)), style.shades(), vmin=0,
          vmax=1, origin='lower', aspect='auto', interpolation='nearest',
      )  # fmt: skip
      axes.set_title(title, loc='left')
      axes.set(xlabel='Client', ylabel='Class')
      for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    bar = figure.colorbar(image, ax=every.tolist(), pad=0.02)
    style.percents(bar.ax.yaxis)
    return style.save(figure, path)
