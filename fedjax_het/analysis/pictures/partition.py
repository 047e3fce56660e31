"""Plots of partitions and training curves (needs matplotlib).

Colours are Okabe and Ito's palette, which is safe for colour-blind readers;
markers or dashes repeat the information. Figures are built without pyplot, so
they need no display and no global state.
"""

import os
import pathlib
import re
import tempfile

import numpy as np

# Without yellow, which has low contrast on white; black last.
_COLOURS = (
    '#0072B2',
    '#D55E00',
    '#009E73',
    '#CC79A7',
    '#56B4E9',
    '#E69F00',
    '#000000',
)
_MARKERS = ('o', 's', 'D', '^', 'v', 'P', 'X')
_DASHES = ('-', '--', '-.', ':')
_GREY = '#6b6b6b'
_SUFFIXES = ('.png', '.pdf', '.svg')
_STYLE = {
    'axes.axisbelow': True,
    'axes.edgecolor': _GREY,
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.titlesize': 11,
    'axes.titleweight': 'bold',
    'font.size': 9,
    'grid.color': '#e4e4e4',
    'grid.linewidth': 0.6,
    'legend.frameon': False,
    'svg.hashsalt': 'fedjax_het',
    'xtick.color': _GREY,
    'xtick.labelcolor': 'black',
    'ytick.color': _GREY,
    'ytick.labelcolor': 'black',
}
_CURVES_A_PANEL = 10


def draw_partition(labels, parts, path, group_of=None, *, title=None):
  """Plots the examples of each client and class as a bubble chart.

  The area of a bubble is proportional to the number of examples, as in FedIN's
  Fig. 3. Bars above show the size of each client.

  Args:
    labels: [n] integers >= 0, the class of each example.
    parts: One array of example indices per client.
    path: File to write; .png, .pdf or .svg.
    group_of: The group of each client (any printable values), which sets the
      colour; None for one colour.
    title: Title, or None.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If `group_of` does not name one group per client, there is no
      client, or the suffix is unknown.
  """
  path = _check_path(path)
  matplotlib = _import_matplotlib()
  labels = np.asarray(labels)
  if not len(parts):
    raise ValueError('There is no client to draw: parts is empty.')
  groups = ['clients'] * len(parts) if group_of is None else list(group_of)
  if len(groups) != len(parts):
    raise ValueError(
        f'group_of names {len(groups)} clients, but there are {len(parts)}.'
    )
  num_classes = int(labels.max()) + 1
  counts = np.stack(
      [np.bincount(labels[part], minlength=num_classes) for part in parts]
  )
  with matplotlib.rc_context(_STYLE):
    figure = _partition_figure(counts, groups, group_of is not None, title)
    return _save(figure, path)


def draw_curves(
    series, path, ylabel, title=None, *, xlabel='Round', percent=False
):
  """Plots one curve per label, with a band if there are several runs.

  More than ten curves are split evenly over panels, one below the other.

  Args:
    series: {label: (rounds, values)}. Rounds are [R]; values are [R], or
      [S, R] for S runs, plotted as mean and band of +- one population
      standard deviation over runs. NaN leaves a gap.
    path: File to write; .png, .pdf or .svg.
    ylabel: Label of the y axis.
    title: Title, or None.
    xlabel: Label of the x axis.
    percent: Whether to print values in [0, 1] as percentages.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no series, rounds and values of one differ in
      length, or the suffix is unknown.
  """
  path = _check_path(path)
  matplotlib = _import_matplotlib()
  if not series:
    raise ValueError('There is no curve to draw: series is empty.')
  curves = {label: _as_curve(label, *pair) for label, pair in series.items()}
  with matplotlib.rc_context(_STYLE):
    num_panels = -(-len(curves) // _CURVES_A_PANEL)
    figure = matplotlib.figure.Figure(
        figsize=(7.2, 4.2 * num_panels), layout='constrained'
    )
    rows = figure.subplots(num_panels, sharex=True, sharey=True, squeeze=False)
    for i, (label, curve) in enumerate(curves.items()):
      panel, place = divmod(i, -(-len(curves) // num_panels))
      _draw_curve(rows[panel, 0], place, label, *curve)
    for axes in rows[:, 0]:
      axes.set(ylabel=ylabel)
      axes.grid(True)
      axes.margins(x=0.02)
      axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
      if percent:
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
      if num_panels > 1:
        axes.legend(loc='upper left', bbox_to_anchor=(1, 1), handlelength=2.8)
    axes.set(xlabel=xlabel)
    if title is not None:
      rows[0, 0].set_title(title, loc='left')
    if num_panels == 1 < len(curves):
      figure.legend(loc='outside right upper', handlelength=2.8)
    return _save(figure, path)


def draw_bars(series, path, ylabel, title=None, *, percent=False):
  """Plots a grouped bar chart: one group per name, one bar per label.

  Args:
    series: {label: {name: values}}; values are [S] for S runs, plotted as mean
      with an error bar of +- one population standard deviation. Names may be
      missing from a label.
    path: File to write; .png, .pdf or .svg.
    ylabel: Label of the y axis.
    title: Title, or None.
    percent: Whether to print values in [0, 1] as percentages.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no bar, or the suffix is unknown.
  """
  path = _check_path(path)
  matplotlib = _import_matplotlib()
  names = list(dict.fromkeys(n for bars in series.values() for n in bars))
  if not names:
    raise ValueError('There is no bar to draw: series is empty.')
  with matplotlib.rc_context(_STYLE):
    width = 2.6 + 0.22 * len(names) * (len(series) + 1)
    figure = matplotlib.figure.Figure(
        figsize=(max(width, 7.2), 4.2), layout='constrained'
    )
    axes = figure.add_subplot()
    thick = 1 / (len(series) + 1)
    for i, (label, bars) in enumerate(series.items()):
      mine = [name for name in names if name in bars]
      place = np.array([names.index(name) for name in mine], float)
      values = [np.asarray(bars[name], float) for name in mine]
      axes.bar(
          place + (i - (len(series) - 1) / 2) * thick,
          [v.mean() for v in values],
          thick,
          yerr=[v.std() for v in values] if max(map(len, values)) > 1 else None,
          label=label,
          color=f'C{i}',
      )
    axes.set(ylabel=ylabel, xticks=range(len(names)))
    axes.set_xticklabels(
        names,
        rotation=30 if max(map(len, names)) > 8 else 0,
        ha='right' if max(map(len, names)) > 8 else 'center',
    )
    axes.grid(True, axis='y')
    axes.set_axisbelow(True)
    if percent:
      axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    if title is not None:
      axes.set_title(title, loc='left')
    figure.legend(loc='outside right upper')
    return _save(figure, path)


def draw_matrices(matrices, names, path):
  """Plots square matrices of values in [0, 1] side by side.

  Args:
    matrices: {title: [N, N]}.
    names: The N names of rows and columns.
    path: File to write; .png, .pdf or .svg.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no matrix, or the suffix is unknown.
  """
  path = _check_path(path)
  matplotlib = _import_matplotlib()
  if not matrices:
    raise ValueError('There is nothing to draw: matrices is empty.')
  with matplotlib.rc_context(_STYLE):
    side = 2.0 + 0.28 * len(names)
    figure = matplotlib.figure.Figure(
        figsize=(len(matrices) * side + 0.8, side), layout='constrained'
    )
    every = np.atleast_1d(figure.subplots(1, len(matrices), sharey=True))
    for axes, (title, matrix) in zip(every, matrices.items(), strict=True):
      image = axes.imshow(matrix, vmin=0, vmax=1, origin='lower')
      axes.set_title(title, loc='left')
      axes.set_xticks(range(len(names)), names, rotation=90)
      axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=every.tolist(), shrink=0.8)
    return _save(figure, path)


def _as_curve(label, rounds, values):
  rounds, values = np.asarray(rounds), np.atleast_2d(np.asarray(values, float))
  if values.ndim != 2 or rounds.shape != values.shape[1:]:
    raise ValueError(
        f'Curve {label!r}: rounds of shape {rounds.shape} do not fit values of '
        f'shape {values.shape}.'
    )
  return rounds, values


def _draw_curve(axes, i, label, rounds, values):
  colour = _COLOURS[i % len(_COLOURS)]
  mean, spread = values.mean(axis=0), values.std(axis=0)
  axes.plot(
      rounds,
      mean,
      color=colour,
      linestyle=_DASHES[i % len(_DASHES)],
      linewidth=1.8,
      marker=_MARKERS[i % len(_MARKERS)],
      markersize=4,
      # About eight markers a curve, to distinguish curves in greyscale.
      markevery=max(1, len(rounds) // 8),
      label=str(label),
  )
  if len(values) > 1:
    axes.fill_between(
        rounds,
        mean - spread,
        mean + spread,
        color=colour,
        alpha=0.18,
        linewidth=0,
    )


def _partition_figure(counts, groups, has_groups, title):
  """Bars of client sizes above a bubble chart of [N, C] counts."""
  matplotlib = _import_matplotlib()
  num_clients, num_classes = counts.shape
  # Cell size in inches: large for ten clients, small for a hundred.
  width = min(np.clip(5.0 / num_clients, 0.13, 0.5), 20.0 / num_clients)
  height = np.clip(4.0 / num_classes, 0.1, 0.24 if num_clients > 40 else 0.36)
  figure = matplotlib.figure.Figure(
      figsize=(
          max(width * num_clients, 2.0) + 2.2,
          max(height * num_classes, 1.2) + 1.9,
      ),
      layout='constrained',
  )
  top, bubbles = figure.subplots(
      2,
      1,
      sharex=True,
      height_ratios=[0.9, max(height * num_classes, 1.2)],
  )
  # The 95 % quantile of counts fills a cell (72 points an inch). Larger bubbles
  # overlap, so that they do not shrink the others to dots.
  usual = np.quantile(counts[counts > 0], 0.95)
  unit = (72 * 0.98 * min(width, height)) ** 2 / usual
  names = sorted(set(groups), key=_natural_key)
  for i, name in enumerate(names):
    members = np.array([group == name for group in groups])
    _draw_group(top, bubbles, counts, members, unit, i, name)
  _label_axes(top, bubbles, num_clients, num_classes)
  figure.align_ylabels()
  if title is not None:
    top.set_title(title, loc='left')
  _add_legends(figure, bubbles, counts.max(), unit, has_groups)
  return figure


def _draw_group(top, bubbles, counts, members, unit, i, name):
  colour = _COLOURS[i % len(_COLOURS)]
  # Areas compare best in one shape, so markers change after all colours.
  marker = _MARKERS[i // len(_COLOURS) % len(_MARKERS)]
  clients = np.flatnonzero(members)
  top.bar(clients, counts[clients].sum(axis=1), width=0.8, color=colour)
  rows, classes = np.nonzero(counts[clients])
  held = counts[clients[rows], classes]
  order = np.argsort(-held, kind='stable')  # Small bubbles on top.
  bubbles.scatter(
      clients[rows][order],
      classes[order],
      s=np.maximum(unit * held[order], 0.7),  # A single example is a dot.
      color=colour,
      marker=marker,
      linewidth=0,
      alpha=0.85,
      clip_on=False,
      label=str(name),
  )


def _label_axes(top, bubbles, num_clients, num_classes):
  matplotlib = _import_matplotlib()
  top.set_ylabel('Examples')
  top.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3, integer=True))
  top.grid(True, axis='y')
  top.tick_params(bottom=False)
  bubbles.set(
      xlabel='Client',
      ylabel='Class',
      xlim=(-0.7, num_clients - 0.3),
      ylim=(-0.7, num_classes - 0.3),
  )
  bubbles.grid(True)
  for axis, count in (
      (bubbles.xaxis, num_clients),
      (bubbles.yaxis, num_classes),
  ):
    steps = [step for step in (1, 2, 5, 10, 20, 50) if count / step <= 20]
    step = steps[0] if steps else count // 10
    axis.set_major_locator(
        matplotlib.ticker.FixedLocator(range(0, count, step))
    )


def _add_legends(figure, bubbles, largest, unit, has_groups):
  """Adds legends of the bubble areas and, if there are any, the groups."""
  matplotlib = _import_matplotlib()
  sizes = sorted({_round_down(largest * share) for share in (1, 0.4, 0.1)})
  scale = [
      matplotlib.lines.Line2D(
          [],
          [],
          linestyle='',
          marker='o',
          color=_GREY,
          markeredgewidth=0,
          markersize=(unit * size) ** 0.5,
          label=f'{size:,}',
      )
      for size in sizes
  ]
  figure.legend(
      handles=scale,
      title='Examples',
      loc='outside right upper',
      labelspacing=max(0.5, (unit * sizes[-1]) ** 0.5 / 9 - 0.7),
  )
  if has_groups:
    handles, _ = bubbles.get_legend_handles_labels()
    proxies = [
        matplotlib.lines.Line2D(
            [],
            [],
            linestyle='',
            marker=_MARKERS[i // len(_COLOURS) % len(_MARKERS)],
            color=_COLOURS[i % len(_COLOURS)],
            markersize=7,
            label=handle.get_label(),
        )
        for i, handle in enumerate(handles)
    ]
    figure.legend(handles=proxies, title='Group', loc='outside right lower')


def _natural_key(name):
  """Key that sorts 'cnn2' before 'cnn10'."""
  pieces = re.split(r'(\d+)', str(name))
  return [(int(p), '') if p.isdigit() else (-1, p) for p in pieces]


def _round_down(value):
  """The largest of 1, 2, 5 times a power of ten that is at most `value`."""
  power = 10 ** int(np.floor(np.log10(max(value, 1))))
  return next(m * power for m in (5, 2, 1) if m * power <= max(value, 1))


def _import_matplotlib():
  try:
    import matplotlib
    import matplotlib.figure
    import matplotlib.lines
    import matplotlib.ticker
  except ImportError as error:
    raise ImportError(
        'Pictures need matplotlib: pip install matplotlib.'
    ) from error
  return matplotlib


def _check_path(path):
  path = pathlib.Path(path)
  if path.suffix not in _SUFFIXES:
    raise ValueError(
        f'Cannot draw to {str(path)!r}: the name must end in one of '
        f'{", ".join(_SUFFIXES)}.'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(f'No such folder to draw into: {path.parent}')
  return path


def _save(figure, path):
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
