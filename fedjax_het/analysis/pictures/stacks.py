"""Stacked bars: the parts of a total, by one or several measures."""

from fedjax_het.analysis.pictures import style


def draw_stacks(panels, path, parts, *, xlabel, ylabel):
  """Draws a stacked bar for each name and measure.

  Args:
    panels: {title: {name: {measure: numbers, one per part}}}, a panel for each
      title.
    path: File to write; .png, .pdf or .svg.
    parts: {measure: names of its parts, from bottom to top}.
    xlabel: Label of the x axis.
    ylabel: Label of the y axis.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If the suffix is unknown.
  """
  path = style.check_path(path)
  matplotlib = style.import_matplotlib()
  with style.drawing():
    # `panels_of` would share axes, but totals differ by orders of magnitude.
    figure = matplotlib.figure.Figure(
        figsize=(7.2, 3.2 * len(panels)), layout='constrained'
    )
    every = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, bars) in zip(every, panels.items(), strict=True):
      axes.set_title(title, loc='left')
      measures = [*dict.fromkeys(m for of in bars.values() for m in of)]
      width = 0.8 / len(measures)
      for k, measure in enumerate(measures):
        shift = (k + 0.5) * width - 0.4
        for i, part in enumerate(parts[measure]):
          below = [sum(of[measure][:i]) for of in bars.values()]
          axes.bar(
              [x + shift for x in range(len(bars))],
              [of[measure][i] for of in bars.values()],
              width,
              below,
              color=style.look(k).colour,
              alpha=1 - 0.6 * i / max(len(parts[measure]) - 1, 1),
              label=f'{part} ({measure})',
          )
      axes.set_xticks(range(len(bars)), [*bars])
      axes.grid(True, axis='y')
      axes.set_axisbelow(True)
      axes.set(xlabel=xlabel, ylabel=ylabel)
      axes.legend()
    return style.save(figure, path)
