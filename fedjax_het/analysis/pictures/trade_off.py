"""Accuracy of methods against their cost."""

from collections.abc import Mapping

import numpy as np

from fedjax_het.analysis.pictures import style


def draw_trade_off(
    panels,
    path,
    xlabel,
    ylabel,
    *,
    looks: Mapping[str, style.Look] | None = None,
    percent=False,
    unit='B',
):
  """Plots a dot for each method at its cost and its accuracy.

  A grey line shows the Pareto frontier: methods that no other beats in both
  cost and accuracy. Panels share their axes, but for the y axis of those with
  less than a quarter of the highest value.

  Args:
    panels: {title: {label: (costs, values)}}, a panel for each title. Costs and
      values are [S] for S runs: the dot is at their means, with +- one sample
      deviation of the values. Costs [S, G] are those of G groups: the dot is at
      the most expensive group, and a line reaches to the cheapest.
    path: File to write; .png, .pdf or .svg.
    xlabel: Label of the x axis, which is logarithmic if costs differ more than
      tenfold.
    ylabel: Label of the y axis.
    looks: {label: look} of all labels; None for looks in the order of labels.
    percent: Whether to print values in [0, 1] as percentages.
    unit: Unit of the costs.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no dot, or the suffix is unknown.
  """
  path = style.check_path(path)
  style.import_matplotlib()
  panels = {title: series for title, series in panels.items() if series}
  labels = [*dict.fromkeys(s for series in panels.values() for s in series)]
  if not labels:
    raise ValueError('There is no dot to draw: panels are empty.')
  looks = looks or style.looks_by_place(labels)
  with style.drawing():
    means = {
        title: [np.mean(values) for _, values in series.values()]
        for title, series in panels.items()
    }
    figure, axes_of = style.panels_of([*panels], low=style.low_panels(means))
    panels = {
        title: {label: (_ends(c), v) for label, (c, v) in series.items()}
        for title, series in panels.items()
    }
    costs = [end for s in panels.values() for ends, _ in s.values()
             for end in ends]  # fmt: skip
    for title, axes in axes_of.items():
      _draw_frontier(axes, panels[title])
      for label, ((least, most), values) in panels[title].items():
        axes.errorbar(
            most,
            np.mean(values),
            style.deviation(values),
            [[most - least], [0]] if least < most else None,
            linestyle='',
            markersize=7,
            elinewidth=1.2,
            label=str(label),
            **style.marker_of(looks[label]),
        )
      axes.grid(True)
      if percent:
        style.percents(axes.yaxis)
    for axes in axes_of.values():  # After all dots, since axes are shared.
      _scale(axes, costs, unit)
    style.name_axes([*axes_of.values()], xlabel=xlabel, ylabel=ylabel)
    style.add_legend(figure, looks, panels, lines=False)
    return style.save(figure, path)


def _ends(costs) -> tuple[float, float]:
  """Costs of the cheapest and the most expensive group, means over runs."""
  costs = np.asarray(costs, float)
  by_group = costs.reshape(len(costs), -1).mean(axis=0)
  return float(by_group.min()), float(by_group.max())


def _far(costs) -> bool:
  """Whether positive costs differ more than tenfold."""
  some = [cost for cost in costs if cost > 0]
  return len(some) > 0 and max(some) > 10 * min(some)


def _scale(axes, costs, unit):
  """Scales the x axis: logarithmic, with zero, if costs differ tenfold."""
  matplotlib = style.import_matplotlib()
  far = _far(costs)
  if not far:
    axes.margins(x=0.1)
    if max(costs) < 1.1 * min(costs):  # Keeps small differences small.
      axes.set_xlim(0.8 * min(costs), 1.2 * max(costs))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
  elif min(costs) > 0:
    axes.set_xscale('log')
    span = max(costs) / min(costs)
    steps = (1, 2, 5) if span < 20 else (1, 3) if span < 100 else (1,)
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=steps))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  else:
    some = [cost for cost in costs if cost > 0]
    low, high = np.floor(np.log10(min(some))), np.ceil(np.log10(max(some)))
    axes.set_xscale('symlog', linthresh=10**low)
    axes.set_xlim(left=-(10**low) / 4)
    ticks = [0, *10 ** np.arange(low, high)]
    axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
  axes.xaxis.set_major_formatter(
      matplotlib.ticker.EngFormatter(unit, places=0 if far else None)
  )


def _draw_frontier(axes, series):
  points = sorted(
      (most, -float(np.mean(values)))
      for (_, most), values in series.values()
      if np.isfinite(np.mean(values))
  )
  if not points:
    return
  chosen = []
  for cost, value in points:
    if not chosen or -value > chosen[-1][1]:
      chosen.append((cost, -value))
  axes.plot(
      *np.transpose(chosen), color=style.GREY, linewidth=1, alpha=0.6, zorder=1,
      drawstyle='steps-post',
  )  # fmt: skip
