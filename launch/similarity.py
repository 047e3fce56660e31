r"""Compares the layers of clients' local models by CKA and CCA.

  python -m launch.similarity --config=configs/private.py:quick
  python -m launch.similarity --config=configs/private.py:similarity,mnist \
      --config.data_dir=DIR --workdir=runs/similarity --out=results/similarity

The second is FeDepth's Fig. 6: a 14-layer ResNet for each of 20 clients, which
hold two digits of MNIST each. Of its training the paper says nothing.

Runs the experiment first, or takes the result of the workdir where that is
finished. The clients of the first group are compared, on test images: layer
by layer, and every layer with every other. Writes similarity.md and
similarity.png.
"""

from collections.abc import Sequence
import contextlib

from absl import flags

from . import terminal, train
from .terminal import fail, folder


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_string('out', 'similarity', 'Folder of the results.')
  flags.DEFINE_integer('num_examples', 1000, 'Test images to compare on.')
  flags.DEFINE_integer('num_clients', 20, 'Clients to compare, at most.')


def compare(config, workdir, num_examples: int, num_clients: int):
  """Runs an experiment and compares its clients' models.

  Args:
    config: The config.
    workdir: The run's folder.
    num_examples: Test images.
    num_clients: Clients of the first group, at most.

  Returns:
    Names of the layers, and {'CKA': [layers, layers], 'CCA': ...}.

  Raises:
    ValueError: If the method has no personal models, or there are fewer than
      two clients to compare.
  """
  import jax

  from fedjax_het import experiment
  from fedjax_het.analysis import similarity
  from fedjax_het.experiment.build import build

  built = build(config)
  group = built.federation.groups[0]
  algorithm = built.algorithm
  if not algorithm.personal:
    raise ValueError(
        f'{config.algorithm.name} has one model for a group; clients can be '
        'compared where models are personal, such as with private.'
    )
  result = experiment.run(config, workdir)
  x = built.preprocess(built.dataset.test_images[:num_examples])
  features = []
  for row in range(min(group.num_clients, num_clients)):
    client = jax.tree.map(
        lambda leaf, row=row: leaf[row], result.state.clients[group.name]
    )
    model = algorithm.client_model(result.state.server, client, group)
    features.append(similarity.block_features(group.model, model, x))
  return list(group.model.block_names), {
      'CKA': similarity.mean_similarity(features),
      'CCA': similarity.mean_similarity(features, similarity.mean_cca),
  }


def main(argv: Sequence[str]) -> None:
  """Writes the comparison that the flags describe."""
  del argv
  from fedjax_het import experiment
  from fedjax_het.analysis import pictures
  from fedjax_het.files import write_atomically
  from fedjax_het.options import at_least
  from fedjax_het.reporting.tables import as_markdown

  options = flags.FLAGS
  try:
    for name in ('num_examples', 'num_clients'):
      at_least(1, **{f'--{name}': options[name].value})
    experiment.check(options.config)
    out = folder('--out', options.out)
    workdir = experiment.new_workdir(options.config)
    if options.workdir is not None:
      workdir = folder('--workdir', options.workdir)
    layers, matrices = compare(
        options.config, workdir, options.num_examples, options.num_clients
    )
    out.mkdir(parents=True, exist_ok=True)
    table = [['layer', *matrices]]
    for i, layer in enumerate(layers):
      table.append([layer, *(f'{m[i, i]:.3f}' for m in matrices.values())])
    text = as_markdown(table)
    write_atomically(
        out / 'similarity.md',
        '# Equal layers of different clients\n\nMean over pairs of clients, on '
        f'{options.num_examples} test images.\n\n{text}\n\n'
        '![Every layer with every other](similarity.png)\n',
    )
    with contextlib.suppress(ImportError):  # No matplotlib: no picture.
      pictures.draw_matrices(matrices, layers, out / 'similarity.png')
  except (ValueError, FileNotFoundError) as e:
    fail(str(e).replace('pass verify=False', 'pass --config.verify=false'))
  except (FloatingPointError, OSError) as e:
    fail(e, 1)
  print(text)
  print(f'\nComparison: {out / "similarity.md"}')


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, train.parse_flags, __doc__)


if __name__ == '__main__':
  run()
