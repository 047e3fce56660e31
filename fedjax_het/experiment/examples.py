"""The examples of an experiment: partition, evaluation and preprocessing."""

from collections.abc import Callable, Iterator
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import partition_file
from fedjax_het.data.federated import crop_flip, cut_out
from fedjax_het.data.partition import partition
from fedjax_het.data.preprocess import make_preprocess, statistics
from fedjax_het.data.sources import Dataset
from fedjax_het.data.splits import (
  split_like,
  split_public,
  split_validation,
  with_wrong_labels,
)
from fedjax_het.experiment import footprint

# Images that are cropped and flipped at once, before the first round.
_AT_ONCE = 2048


@contextlib.contextmanager
def naming(section: str) -> Iterator[None]:
  """Adds the section of the config to the message of a ValueError."""
  try:
    yield
  except ValueError as e:
    raise ValueError(f'{section}: {e}') from e


def subset(config, dataset: Dataset) -> Dataset:
  """Takes `train_size` of the training examples.

  Args:
    config: The config.
    dataset: The data set.

  Returns:
    The data set with these training examples alone.

  Raises:
    ValueError: If `train_size` exceeds the training set.
  """
  images, labels = dataset.train_images, dataset.train_labels
  if config.train_size in (None, len(labels)):
    return dataset
  if config.train_size > len(labels):
    raise ValueError(
        f'train_size={config.train_size} is more than the {len(labels)} '
        f'training examples of {config.dataset}.'
    )
  used, _ = split_public(labels, config.train_size, seed=config.partition.seed)
  return dataset._replace(train_images=images[used], train_labels=labels[used])


def with_noise(config, dataset: Dataset) -> Dataset:
  """Replaces the share `label_noise` of the training labels by wrong ones.

  Examples are assigned to clients by their right labels, before this, so that
  the level of noise does not change who holds which.

  Args:
    config: The config.
    dataset: The data set.

  Returns:
    The data set with these labels.

  Raises:
    ValueError: If there is no other class.
  """
  if not config.label_noise:
    return dataset
  with naming(f'label_noise={config.label_noise}'):
    labels = with_wrong_labels(
        dataset.train_labels,
        config.label_noise,
        dataset.num_classes,
        seed=config.partition.seed,
    )
  return dataset._replace(train_labels=labels)


def augmented_once(config, dataset: Dataset, parts) -> Dataset:
  """Crops and flips each image that a client trains on, for 'crop_flip_once'.

  Args:
    config: The config.
    dataset: The data set.
    parts: The training examples of each client. Others, such as held-out ones,
      stay as they are.

  Returns:
    The data set with these images, which are the same in all runs of one
    `partition.seed`.

  Raises:
    ValueError: If `local.augment` is set for examples that are not images.
  """
  if config.local.augment != 'crop_flip_once':
    return dataset
  _check_images(config, dataset)
  key = jax.random.key(config.partition.seed, impl='threefry2x32')
  images = dataset.train_images
  starts = range(0, len(images), _AT_ONCE)
  done = [
      crop_flip(jax.random.fold_in(key, at), images[at : at + _AT_ONCE])
      for at in starts
  ]
  augmented, own = images.copy(), np.concatenate(parts)
  augmented[own] = np.concatenate(done)[own]
  return dataset._replace(train_images=augmented)


def _check_images(config, dataset: Dataset) -> None:
  """Raises ValueError if `local.augment` is set for other than images."""
  features = dataset.train_images
  plain = not len(dataset.mean)  # Integers or bools.
  if config.local.augment != 'none' and (plain or features.ndim != 4):
    raise ValueError(
        f'local.augment={config.local.augment!r} is for images [height, width, '
        f'channels], but the examples of {config.dataset} are '
        f'{features.shape[1:]} {features.dtype}.'
    )


def resize(dataset: Dataset, size: int | None) -> Dataset:
  """Resizes all images bilinearly to `size` x `size`.

  Args:
    dataset: The data set, of images [N, H, W, C] uint8 or float32.
    size: The new height and width; None changes nothing.

  Returns:
    The data set with images of the same dtype, and the mean and deviation of
    the resized training images; uint8 pixels are rounded.

  Raises:
    ValueError: If the examples are not images, or need too much memory.
  """
  shape, dtype = dataset.train_images.shape[1:], dataset.train_images.dtype
  if size is None or shape[:2] == (size, size):
    return dataset
  if len(shape) != 3 or dtype not in (np.uint8, np.float32):
    raise ValueError(
        f'image_size={size} is for images [height, width, channels] of pixels '
        f'or floats, but the examples of {dataset.name} are {shape} {dtype}.'
    )
  num, channels = len(dataset.train_labels), shape[2]
  numbers = channels * dtype.itemsize
  footprint.check_images(num + len(dataset.test_labels), numbers, size)
  # A batch is resized in float32, so batches of large images are smaller.
  step = 1000 if size <= 256 else max(1, 1000 * 256**2 // size**2)

  @jax.jit
  def resize(images):
    shape = (len(images), size, size, images.shape[3])
    resized = jax.image.resize(images.astype(jnp.float32), shape, 'linear')
    if images.dtype == jnp.uint8:
      resized = jnp.round(resized)
    return resized.astype(images.dtype)

  def all_of(images):
    batches = [images[i : i + step] for i in range(0, len(images), step)]
    return np.concatenate([np.asarray(resize(batch)) for batch in batches])

  train = all_of(dataset.train_images)
  mean, std = statistics(train)
  return dataset._replace(
      train_images=train,
      test_images=all_of(dataset.test_images),
      mean=mean,
      std=std,
  )


def assign(config, labels, num_clients: int):
  """Assigns the training examples to clients and the public set.

  Args:
    config: The config.
    labels: [N] int32, of the training set.
    num_clients: Clients of all groups.

  Returns:
    One int32 array of examples per client, and the examples of the public set
    or None.

  Raises:
    ValueError: If the partition or the public set is impossible; names the
      section of the config.
  """
  by_file = config.partition.name == 'file'
  if by_file and config.train_size is not None:
    raise ValueError(
        f'train_size={config.train_size}: a partition by file names examples '
        'of the whole training set; leave it out.'
    )
  assign = functools.partial(
      partition, num_clients=num_clients, **config.partition.to_dict()
  )
  if config.public_size is None or by_file:
    with naming('partition'):
      parts = assign(labels)
    if config.public_size is None:
      return parts, None
    with naming('public_size'):
      return parts, _public_of_rest(config, labels, parts)
  with naming('public_size'):
    public, private = split_public(
        labels, config.public_size, seed=config.partition.seed
    )
  if len(private) < num_clients:
    raise ValueError(
        f'public_size={config.public_size} leaves {len(private)} of '
        f'{len(labels)} training examples to {num_clients} clients; set a '
        'smaller one.'
    )
  with naming('partition'):
    parts = assign(labels[private])
  return [private[part] for part in parts], public


def _public_of_rest(config, labels, parts) -> np.ndarray:
  """A public set of examples that no client has."""
  rest = np.setdiff1d(np.arange(len(labels)), np.concatenate(parts))
  rest, size = rest.astype(np.int32), config.public_size
  if size > len(rest):
    raise ValueError(
        f'{config.partition.file} leaves {len(rest)} examples unassigned, of '
        f'which a public set of {size} cannot be taken.'
    )
  if size == len(rest):
    return rest
  return rest[split_public(labels[rest], size, seed=config.partition.seed)[0]]


def own_tests(config, dataset: Dataset, parts):
  """The test examples of each client, for `personal_test`.

  Args:
    config: The config.
    dataset: The data set.
    parts: The training examples of each client.

  Returns:
    One int32 array per client: from the partition's file if it lists them, else
    a share of the test set in the proportions of `parts`. None without
    `config.personal_test`.

  Raises:
    ValueError: If the test examples in the partition's file are invalid.
  """
  if not config.personal_test:
    return None
  if config.partition.name == 'file':
    with naming('partition'):
      listed = partition_file.own_tests(
          config.partition.file, len(parts), len(dataset.test_labels)
      )
    if listed is not None:
      return listed
  return split_like(
      dataset.train_labels,
      parts,
      dataset.test_labels,
      seed=config.partition.seed,
  )


def hold_out(config, parts, labels):
  """Holds out validation examples of each client.

  Args:
    config: The config.
    parts: The training examples of each client.
    labels: [N] int32, of the training set.

  Returns:
    What each client trains on, and the held-out examples of all clients
    together; None without `config.validation`.

  Raises:
    ValueError: If no example is held out.
  """
  if config.validation is None:
    return parts, None
  with naming('validation'):
    parts, held_out = split_validation(
        parts, config.validation, seed=config.partition.seed, labels=labels
    )
  held_out = np.concatenate(held_out)
  if not len(held_out):
    raise ValueError(
        f'validation={config.validation} holds out no example: no client has '
        f'as many as {1 / config.validation:.0f}.'
    )
  return parts, held_out


def preprocess(config, dataset: Dataset) -> Callable[..., jax.Array]:
  """Builds the function from stored examples to model inputs.

  Args:
    config: Its `normalise` and `local.augment` are used.
    dataset: The data set.

  Returns:
    See `make_preprocess`.

  Raises:
    ValueError: If `local.augment` is set for examples that are not images.
  """
  _check_images(config, dataset)
  features, mean, std = dataset.train_images, dataset.mean, dataset.std
  if config.normalise == 'half':
    mean = std = (0.5,) * len(mean)
  augmentation = _augmentation(config.local)
  return make_preprocess(features, mean, std, *augmentation)


def check_tokens(vocabulary: int | None, dataset: Dataset) -> None:
  """Raises ValueError if the examples are not token ids that a model takes.

  Args:
    vocabulary: The model's vocabulary size; None for a model without one, which
      takes all examples.
    dataset: The data set.
  """
  if vocabulary is None:
    return
  arrays = dataset.train_images, dataset.test_images
  dtype = arrays[0].dtype
  if dtype == np.uint8 or not np.issubdtype(dtype, np.integer):
    raise ValueError(
        'it takes token ids, integers of 16 or 32 bits, but the examples of '
        f'{dataset.name} are {dtype}'
        + (', which are pixels.' if dtype == np.uint8 else '.')
    )
  low, high = min(a.min() for a in arrays), max(a.max() for a in arrays)
  if low < 0 or high >= vocabulary:
    remedy = '' if low < 0 else f'; set vocabulary to at least {high + 1}'
    raise ValueError(
        f'its vocabulary={vocabulary} holds the token ids 0..{vocabulary - 1}, '
        f'but {dataset.name} has {low if low < 0 else high}{remedy}.'
    )


_cut_out = functools.partial(cut_out, side=16)


def _crop_flip_cutout(key, images):
  return _cut_out(key, crop_flip(key, images))


def _augmentation(local):
  """Augmentations of images before and after they are normalised."""
  if local.augment == 'crop_flip':
    return crop_flip, None
  if local.augment != 'crop_flip_cutout':
    return None, None
  if local.cutout == 'before':
    return _crop_flip_cutout, None
  return crop_flip, _cut_out
