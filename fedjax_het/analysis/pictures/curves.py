"""Curves over rounds or time, a panel for each column of a table."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_het.analysis.pictures import style

_MOST_MARKS = 12
# Panels share their x axis up to this ratio of the longest to the shortest.
_LONGEST = 3


def draw_curves(
    panels,
    path,
    ylabel,
    *,
    looks: Mapping[str, style.Look] | None = None,
    xlabel='Round',
    percent=False,
    marks: Sequence[float] | Mapping[float, str] = (),
):
  """Plots one curve per label, with a band if there are several runs.

  Args:
    panels: {title: {label: (x, values)}}, a panel for each title; '' for no
      title. x is [R]; values are [R], or [S, R] for S runs, plotted as mean
      and band of +- one sample deviation over runs. NaN leaves a gap. The
      panels share their x axis, unless one is over three times as long as
      another. They share their y axis, but for those with less than a quarter
      of the highest value.
    path: File to write; .png, .pdf or .svg.
    ylabel: Label of the y axis.
    looks: {label: look} of all labels; None for looks in the order of labels.
    xlabel: Label of the x axis.
    percent: Whether to print values in [0, 1] as percentages.
    marks: Numbers to mark on the x axis, or {number: label}, instead of round
      ones, if there are at most twelve. If the last number, in order, is at
      least ten times the first, the axis is logarithmic.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no curve, a curve's x and values differ in length,
      or the suffix is unknown.
  """
  path = style.check_path(path)
  matplotlib = style.import_matplotlib()
  panels = {
      title: {label: _as_curve(label, *pair) for label, pair in series.items()}
      for title, series in panels.items()
      if series
  }
  labels = [*dict.fromkeys(s for series in panels.values() for s in series)]
  if not labels:
    raise ValueError('There is no curve to draw: panels are empty.')
  looks = looks or style.looks_by_place(labels)
  with style.drawing():
    figure, every = style.panels_of(
        [*panels], sharex=_alike(panels), low=style.low_panels(_values(panels))
    )
    for title, axes in every.items():
      for label, curve in panels[title].items():
        _draw_curve(axes, looks[label], label, *curve)
      axes.grid(True)
      axes.margins(x=0.02)
      if marks:
        if not isinstance(marks, Mapping):
          marks = {number: f'{number:g}' for number in marks}
        _mark(axes, marks)
      else:
        axes.xaxis.set_major_locator(
            matplotlib.ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10])
        )
      if percent:
        style.percents(axes.yaxis)
    style.name_axes([*every.values()], xlabel=xlabel, ylabel=ylabel)
    if len(labels) > 1:
      style.add_legend(figure, looks, panels, lines=True)
    return style.save(figure, path)


def _alike(panels) -> bool:
  """Whether the panels' curves end at numbers of like size."""
  ends = [
      max(np.max(rounds, initial=0) for rounds, _ in series.values())
      for series in panels.values()
  ]
  return max(ends) <= _LONGEST * min(ends)


def _values(panels):
  """{title: the means of its curves}."""
  return {
      title: [v for _, values in series.values() for v in values.mean(axis=0)]
      for title, series in panels.items()
  }


def _mark(axes, labels: Mapping[float, str]) -> None:
  """Labels numbers of the x axis; a wide range gets a logarithmic axis."""
  marks = sorted(labels)
  if 0 < 10 * marks[0] <= marks[-1]:
    axes.set_xscale('log')
  if len(marks) <= _MOST_MARKS:  # The labels of more would overlap.
    axes.set_xticks(marks, [labels[number] for number in marks])
    axes.set_xticks([], minor=True)


def _as_curve(label, rounds, values):
  rounds, values = np.asarray(rounds), np.atleast_2d(np.asarray(values, float))
  if values.ndim != 2 or rounds.shape != values.shape[1:]:
    raise ValueError(
        f'Curve {label!r}: rounds of shape {rounds.shape} do not fit values of '
        f'shape {values.shape}.'
    )
  return rounds, values


def _draw_curve(axes, look, label, rounds, values):
  mean, spread = values.mean(axis=0), style.deviation(values, 0)
  axes.plot(
      rounds,
      mean,
      linestyle=look.dash,
      linewidth=1.8,
      markersize=4,
      # About eight markers a curve, to distinguish curves in greyscale.
      markevery=max(1, len(rounds) // 8),
      label=str(label),
      **style.marker_of(look),
  )
  if len(values) > 1:
    axes.fill_between(
        rounds,
        mean - spread,
        mean + spread,
        color=look.colour,
        alpha=0.18,
        linewidth=0,
    )
