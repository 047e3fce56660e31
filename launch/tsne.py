r"""Draws the features of stored runs in two dimensions, by t-SNE.

  python -m launch.tsne --workdir=runs/quick
  python -m launch.tsne --workdir=runs/fedavg,runs/fedin --label=3 \
      --stage=stage4

This is FedIN's Fig. 3 and Fig. 8. The networks of a run (of its groups, or of
some clients) map the same test images to features, which are embedded together:
each point is one image in one network. Without --stage the features are s_out,
the outputs of the intermediate layers, averaged over pixels. Each run has a
panel by network and, unless --label names a single class, a panel by class.
t-SNE preserves neighbours; distances between clusters, their sizes and the axes
have no meaning.

The program writes tsne.png, and the points as tsne.csv.
"""

from collections.abc import Sequence
import contextlib
from typing import Any, NamedTuple

from absl import flags

from . import stored_runs, terminal
from .stored_runs import names_of, networks, open_runs
from .terminal import fail, folder


class Points(NamedTuple):
  """The embedded features of a run.

  Attributes:
    name: The run.
    place: [P, 2], the coordinates of P points.
    network: P labels of networks.
    classes: [P], the classes of the images.
  """

  name: str
  place: Any
  network: list[str]
  classes: Any


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_list('workdir', None, 'Folder of a run, or of several.')
  flags.DEFINE_string('out', 'tsne', 'Folder of the results.')
  flags.DEFINE_string(
      'stage', None, 'Last block of the features; s_out by default.'
  )
  flags.DEFINE_integer('label', None, 'Images of this class alone.')
  flags.DEFINE_integer('num_examples', 200, 'Test images, at most.')
  flags.DEFINE_integer('num_clients', 5, 'Groups or clients, at most.')
  flags.DEFINE_float('perplexity', 30.0, 'Neighbours that a point looks at.')
  flags.DEFINE_integer('seed', 0, 'Seed of the embedding.')
  stored_runs.define_flags()


def embed_run(
    run,
    name: str,
    *,
    stage: str | None,
    label: int | None,
    num_examples: int,
    num_clients: int,
    perplexity: float,
    seed: int,
) -> Points:
  """Embeds the features of one run.

  Args:
    run: The run, as `load_run` returns it.
    name: Its name in the result.
    stage: See `similarity.stages`; None for s_out.
    label: A class; None for all.
    num_examples: Largest number of test images.
    num_clients: Largest number of networks.
    perplexity: See `embedding.tsne`.
    seed: See `embedding.tsne`.

  Returns:
    The points.

  Raises:
    ValueError: If the stage or the class is missing, networks have features
      of different lengths, or there are too few points.
    FileNotFoundError: If data or checkpoints are missing.
  """
  import numpy as np

  from fedjax_het.analysis import embedding, similarity

  compared = networks(run, num_clients)
  dataset = run.experiment.dataset
  classes = dataset.test_labels
  rows = np.arange(len(classes))
  if label is not None:
    rows = np.flatnonzero(classes == label)
    if not len(rows):
      raise ValueError(
          f'--label={label}: {run.workdir} has no test image of that class.'
      )
  rows = rows[:num_examples]
  x = run.experiment.preprocess(dataset.test_images[rows])
  features = []
  for network in compared:
    if stage is None:
      block = network.model.intermediate[-1]
    else:
      block = similarity.stage_block(network.model, stage)
    features.append(
        similarity.block_features(network.model, network.variables, x)[block]
    )
  if len({feature.shape[1] for feature in features}) > 1:
    widths = ', '.join(
        f'{network.label} {feature.shape[1]}'
        for network, feature in zip(compared, features, strict=True)
    )
    raise ValueError(
        f'{run.workdir}: features of different lengths ({widths}) have no '
        'distance; name another --stage.'
    )
  place = embedding.tsne(
      np.concatenate(features), perplexity=perplexity, seed=seed
  )
  labels = [network.label for network in compared for _ in rows]
  return Points(name, place, labels, np.tile(classes[rows], len(compared)))


def panels(points: Sequence[Points], by_class: bool) -> dict[str, Any]:
  """{'by network': {run: {label: [n, 2]}}, 'by class': ...}."""
  import numpy as np

  def split(place, labels, names):
    return {name: place[np.array(labels) == name] for name in names}

  found = {'by network': {}, 'by class': {}}
  for one in points:
    of_class = [f'class {label}' for label in one.classes]
    found['by network'][one.name] = split(
        one.place, one.network, dict.fromkeys(one.network)
    )
    names = [f'class {label}' for label in np.unique(one.classes)]
    found['by class'][one.name] = split(one.place, of_class, names)
  if not by_class:
    del found['by class']
  return found


def main(argv: Sequence[str]) -> None:
  """Draws the pictures that the flags describe."""
  del argv
  options = flags.FLAGS
  if not options.workdir:
    fail('Name a run: python -m launch.tsne --workdir=DIR.')
  from fedjax_het.analysis import pictures
  from fedjax_het.files import write_atomically
  from fedjax_het.options import at_least, integer_between, positive
  from fedjax_het.reporting.tables import as_csv

  try:
    for name in ('num_examples', 'num_clients'):
      at_least(1, **{f'--{name}': options[name].value})
    positive(**{'--perplexity': options.perplexity})
    integer_between(0, None, **{'--seed': options.seed})
    out = folder('--out', options.out)
    stored_runs.register()
    setting = {
        name: options[name].value
        for name in ('stage', 'label', 'num_examples', 'num_clients',
                     'perplexity', 'seed')
    }  # fmt: skip
    runs = open_runs(
        options.workdir,
        options.data_dir,
        options.data_file,
        options.partition_file,
    )
    points = [
        embed_run(run, name, **setting)
        for run, name in zip(runs, names_of(runs), strict=True)
    ]
    out.mkdir(parents=True, exist_ok=True)
    table = [['run', 'network', 'class', 'x', 'y']]
    for one in points:
      for (x, y), network, number in zip(
          one.place, one.network, one.classes, strict=True
      ):
        table.append([one.name, network, int(number), float(x), float(y)])
    write_atomically(out / 'tsne.csv', as_csv(table))
    print(f'Points: {out / "tsne.csv"}')
    with contextlib.suppress(ImportError):  # No matplotlib: no picture.
      path = pictures.draw_points(
          panels(points, options.label is None), out / 'tsne.png'
      )
      print(f'Picture: {path}')
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(e)
  except OSError as e:
    fail(e, 1)


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, terminal.parse_flags, __doc__)


if __name__ == '__main__':
  run()
