"""Rows of images, such as originals above their reconstructions."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_het.analysis.pictures import style


def draw_images(
    rows, path, *, captions: Mapping[str, Sequence[str]] | None = None
):
  """Plots images in a grid, a row for each label.

  Args:
    rows: {label: [N, H, W, C]}, values in [0, 1], the same N in each row. One
      channel is shown in grey, three as RGB; for other C the first is shown.
    path: File to write; .png, .pdf or .svg.
    captions: {label: N texts}, printed below the images of a row.

  Returns:
    The path, a pathlib.Path. The file appears complete or not at all.

  Raises:
    ImportError: If matplotlib is not installed.
    FileNotFoundError: If the folder does not exist.
    ValueError: If there is no image, rows differ in length, or the suffix is
      unknown.
  """
  path = style.check_path(path)
  matplotlib = style.import_matplotlib()
  lengths = {len(images) for images in rows.values()}
  if len(lengths) != 1 or 0 in lengths:
    raise ValueError(
        'Rows must hold equally many images, at least one, got '
        f'{[len(images) for images in rows.values()]}.'
    )
  columns = lengths.pop()
  captions = captions or {}
  with style.drawing():
    figure = matplotlib.figure.Figure(
        figsize=(0.95 * columns + 1.6, 1.2 * len(rows) + 0.2),
        layout='constrained',
    )
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (label, images) in zip(grid, rows.items(), strict=True):
      texts = captions.get(label, [''] * columns)
      for axes, image, text in zip(line, images, texts, strict=True):
        _draw_image(axes, np.asarray(image), text)
      line[0].set_ylabel(
          label, rotation=0, ha='right', va='center', color='black'
      )
    return style.save(figure, path)


def _draw_image(axes, image, text):
  shown = image if image.shape[-1] == 3 else image[..., 0]
  axes.imshow(shown, 'gray', vmin=0, vmax=1, interpolation='nearest')
  axes.set_xlabel(text, fontsize=6)
  axes.set_xticks([])
  axes.set_yticks([])
  axes.spines[:].set_visible(False)
