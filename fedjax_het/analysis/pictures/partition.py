"""Bubble charts: which client holds how many examples of which class."""

import numpy as np

from fedjax_het.analysis.pictures import style


def draw_partition(labels, parts, path, group_of=None, *, title=None):
  """Plots the examples of each client and class as a bubble chart.

  The area of a bubble is proportional to the number of examples, as in FedIN's
  Fig. 3. Bars above show the size of each client.

  Args:
    labels: [n] integers >= 0, the class of each example.
    parts: One array of example indices per client.
    path: File to write; .png, .pdf or .svg.
    group_of: The group of each client (any printable value), which sets its
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
  path = style.check_path(path)
  style.import_matplotlib()
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
  with style.drawing():
    figure = _partition_figure(counts, groups, group_of is not None, title)
    return style.save(figure, path)


def _partition_figure(counts, groups, has_groups, title):
  """Bars of client sizes above a bubble chart of [N, C] counts."""
  matplotlib = style.import_matplotlib()
  num_clients, num_classes = counts.shape
  # Cell size in inches: large for ten clients, small for a hundred.
  width = min(np.clip(5.0 / num_clients, 0.13, 0.5), 20.0 / num_clients)
  height = np.clip(4.0 / num_classes, 0.1, 0.24 if num_clients > 40 else 0.36)
  figure = matplotlib.figure.Figure(
      figsize=(
          max(width * num_clients, 2.0, 0.09 * len(title or '')) + 2.2,
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
  # The 95 % quantile of counts fills a cell (72 points per inch). Larger
  # bubbles overlap; scaling by the largest would shrink the others to dots.
  usual = np.quantile(counts[counts > 0], 0.95)
  unit = (72 * 0.98 * min(width, height)) ** 2 / usual
  # Areas compare best in one shape, so markers change only after all colours.
  shapes = np.repeat(style.MARKERS, len(style.GROUP_COLOURS))
  looks = {
      name: look._replace(marker=shapes[i % len(shapes)])
      for i, (name, look) in enumerate(style.group_looks(groups).items())
  }
  for name, look in looks.items():
    members = np.array([group == name for group in groups])
    _draw_group(top, bubbles, counts, members, unit, look, name)
  _label_axes(top, bubbles, num_clients, num_classes)
  figure.align_ylabels()
  if title is not None:
    top.set_title(title, loc='left')
  _add_legends(figure, counts.max(), unit, looks if has_groups else {})
  return figure


def _draw_group(top, bubbles, counts, members, unit, look, name):
  clients = np.flatnonzero(members)
  top.bar(clients, counts[clients].sum(axis=1), width=0.8, color=look.colour)
  rows, classes = np.nonzero(counts[clients])
  held = counts[clients[rows], classes]
  order = np.argsort(-held, kind='stable')  # Small bubbles on top.
  bubbles.scatter(
      clients[rows][order],
      classes[order],
      s=np.maximum(unit * held[order], 0.7),  # A single example is a dot.
      color=look.colour,
      marker=look.marker,
      linewidth=0,
      alpha=0.85,
      clip_on=False,
      label=str(name),
  )


def _label_axes(top, bubbles, num_clients, num_classes):
  matplotlib = style.import_matplotlib()
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


def _add_legends(figure, largest, unit, looks):
  """Adds legends of the bubble areas and, if there are any, the groups."""
  matplotlib = style.import_matplotlib()
  sizes = sorted({_round_down(largest * share) for share in (1, 0.4, 0.1)})
  scale = [
      matplotlib.lines.Line2D(
          [],
          [],
          linestyle='',
          marker='o',
          color=style.GREY,
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
  if looks:
    proxies = [
        matplotlib.lines.Line2D(
            [],
            [],
            linestyle='',
            marker=look.marker,
            color=look.colour,
            markersize=7,
            label=str(name),
        )
        for name, look in looks.items()
    ]
    figure.legend(handles=proxies, title='Group', loc='outside right lower')


def _round_down(value):
  """The largest of 1, 2, 5 times a power of ten that is at most `value`."""
  power = 10 ** int(np.floor(np.log10(max(value, 1))))
  return next(m * power for m in (5, 2, 1) if m * power <= max(value, 1))
