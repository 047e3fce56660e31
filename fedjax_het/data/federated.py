"""The data set on the device, with one index table per client.

The device stores all examples once, in their own type: images as uint8, other
features as floats, integers or bools. A client is a row of indices. Batches are
gathered, normalised and augmented inside the compiled step.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import arrays
from fedjax_het.names import shown
from fedjax_het.options import at_least, check_type, positive

# Replaces a hidden label. -1 would select the last class.
NO_LABEL = np.iinfo(np.int32).min


class Batch(NamedTuple):
  """One minibatch.

  Attributes:
    x: [B, ...], the model's inputs; for images [B, H, W, C] float32,
      normalised.
    y: [B] int32 labels, or [B, ...] int32 or float32 for other tasks.
    mask: [B] bool, False for padding; None when no example is padding.
    position: [B] int32, index of each example in its client's table, which
      identifies it across epochs and rounds.
  """

  x: jax.Array
  y: jax.Array
  mask: jax.Array | None
  position: jax.Array


class Examples(Protocol):
  """Interface of a set of examples for training and inference loops.

  `ClientData` holds examples of the data set, `InMemory` any other arrays, such
  as features that a server has received.

  Attributes:
    size: [] int32, number of examples.
    length: Number of entries of the table, padding included; static.
  """

  size: jax.Array

  @property
  def length(self) -> int:
    """Number of entries of the table, at least `size`."""

  def batch(self, position, mask=None, key=None) -> Batch:
    """The examples at `position` ([B] int32), augmented if there is a key."""


@flax.struct.dataclass
class InMemory:
  """Examples given as arrays, which are used without preprocessing.

  Attributes:
    x: [M, ...], inputs.
    y: [M, ...], labels.
    size: [] int32, number of valid examples; these are the first of the M.
  """

  x: jax.Array
  y: jax.Array
  size: jax.Array

  @property
  def length(self) -> int:
    """M."""
    return self.y.shape[0]

  def batch(self, position, mask=None, key=None) -> Batch:
    """Gathers the examples at `position` ([B] int32); nothing is random."""
    del key
    return Batch(self.x[position], self.y[position], mask, position)


class Unaugmented(NamedTuple):
  """Preprocessing that does not augment, whatever the key.

  Attributes:
    preprocess: See `ClientData`.
  """

  preprocess: Callable[..., jax.Array]

  def __call__(
      self, images: jax.Array, key: jax.Array | None = None
  ) -> jax.Array:
    """uint8 -> float32."""
    del key
    return self.preprocess(images)


@flax.struct.dataclass
class ClientData:
  """The examples of one client.

  Attributes:
    images: [N, ...] of any type, the features of the whole data set (shared by
      all clients); for images [N, H, W, C] uint8.
    labels: [N, ...] int32 or float32.
    index: [M] int32, the client's examples, padded.
    size: [] int32, number of entries of `index` that are not padding.
    preprocess: `(features, key or None) -> inputs`; augments only when a key is
      given.
    public: [P] int32, examples of the public set, or None.
  """

  images: jax.Array
  labels: jax.Array
  index: jax.Array
  size: jax.Array
  preprocess: Callable[..., jax.Array] = flax.struct.field(pytree_node=False)
  public: jax.Array | None = None

  @property
  def length(self) -> int:
    """M."""
    return self.index.shape[0]

  def of_public(self) -> 'ClientData':
    """The public set in the form of a client's data."""
    size = jnp.int32(len(self.public))
    return self.replace(index=self.public, size=size)

  def unaugmented(self) -> 'ClientData':
    """The same examples, never augmented."""
    return self.replace(preprocess=Unaugmented(self.preprocess))

  def batch(self, position, mask=None, key=None) -> Batch:
    """Gathers the examples at `position` ([B] int32) of the client's table."""
    example = self.index[position]
    x = self.preprocess(self.images[example], key)
    return Batch(x, self.labels[example], mask, position)


@flax.struct.dataclass
class FederatedData:
  """All clients' examples.

  Attributes:
    images: [N, ...] of any type, see `ClientData`.
    labels: [N, ...] int32 or float32.
    index: [K, M] int32, one padded row per client.
    sizes: [K] int32, number of examples of each client.
    preprocess: See `ClientData`.
    public: See `ClientData`.
    largest_label: The largest integer label of an example that a client or the
      public set has; None if that is not known, or labels are real numbers.
      It is static, so that labels can be checked while a program is traced.
  """

  images: jax.Array
  labels: jax.Array
  index: jax.Array
  sizes: jax.Array
  preprocess: Callable[..., jax.Array] = flax.struct.field(pytree_node=False)
  public: jax.Array | None = None
  largest_label: int | None = flax.struct.field(
      pytree_node=False, default=None
  )

  @property
  def num_clients(self) -> int:
    """K."""
    return self.index.shape[0]

  def of_public(self) -> ClientData | None:
    """The public examples; None where there are none."""
    if self.public is None:
      return None
    return self.client(0).of_public()

  def client(self, client_id: int | jax.Array) -> ClientData:
    """The examples of one client; `client_id` may be traced."""
    return ClientData(
        self.images,
        self.labels,
        self.index[client_id],
        self.sizes[client_id],
        self.preprocess,
        self.public,
    )


def check_scale(mean, std) -> None:
  """Raises ValueError unless the mean is finite and the deviation above 0."""
  for value in np.atleast_1d(mean).tolist():
    check_type('mean of the features', value, float)
  for value in np.atleast_1d(std).tolist():
    positive(**{'std of the features': value})


@dataclasses.dataclass(frozen=True)
class Normalise:
  """Maps uint8 images to zero mean and unit variance per channel.

  Attributes:
    mean: Per-channel mean of the training images in [0, 1].
    std: Per-channel standard deviation in [0, 1], above 0.
    augment: `(key, images [B, H, W, C] uint8) -> images`, applied when a key
      is given; None for no augmentation.
    augment_after: Like `augment`, for normalised float32 images, with the same
      key.

  Raises:
    ValueError: If a number is out of its range.
  """

  mean: tuple[float, ...]
  std: tuple[float, ...]
  augment: Callable[..., jax.Array] | None = None
  augment_after: Callable[..., jax.Array] | None = None

  def __post_init__(self):
    check_scale(self.mean, self.std)

  def __call__(self, images, key=None):
    """[B, H, W, C] uint8 -> float32, augmented if there is a key."""
    if self.augment is not None and key is not None:
      images = self.augment(key, images)
    scale = 1.0 / (255.0 * np.asarray(self.std, np.float32))
    shift = np.asarray(self.mean, np.float32) / np.asarray(
        self.std, np.float32
    )
    channels = (1,) * (images.ndim - 1) + (-1,)
    x = images.astype(jnp.float32)
    x = x * scale.reshape(channels) - shift.reshape(channels)
    if self.augment_after is not None and key is not None:
      x = self.augment_after(key, x)
    return x


def crop_flip(key, images, *, pad=4, flip=True):
  """Random crop after zero padding, and horizontal flip.

  Args:
    key: A random key.
    images: [B, H, W, C] uint8.
    pad: Pixels of zero padding on each side before the crop.
    flip: Whether to mirror half of the images.

  Returns:
    [B, H, W, C] uint8.

  Raises:
    ValueError: If `pad` is not an integer of at least 0.
  """
  at_least(0, pad=pad)
  num, height, width, channels = images.shape
  crop_key, flip_key, _ = jax.random.split(key, 3)
  padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  offset = jax.random.randint(crop_key, (num, 2), 0, 2 * pad + 1)
  images = jax.vmap(
      lambda image, o: jax.lax.dynamic_slice(
          image, (o[0], o[1], 0), (height, width, channels)
      )
  )(padded, offset)
  if flip:
    mirrored = jax.random.bernoulli(flip_key, 0.5, (num, 1, 1, 1))
    images = jnp.where(mirrored, images[:, :, ::-1], images)
  return images


def cut_out(key, images, *, side: int):
  """Sets one square of every image to zero.

  Zero is black in uint8 images, and the training set's mean colour in
  normalised ones. The square's centre is uniform over the image; the square is
  cropped at the border.

  Args:
    key: A random key; `crop_flip` draws independently from the same one.
    images: [B, H, W, C] of any type.
    side: Side of the square.

  Returns:
    [B, H, W, C] of the same type.

  Raises:
    ValueError: If `side` is not an integer of at least 0.

  References:
    DeVries and Taylor, `Improved Regularization of Convolutional Neural
    Networks with Cutout <https://arxiv.org/abs/1708.04552>`_, 2017.
  """
  at_least(0, side=side)
  num, height, width, _ = images.shape
  _, _, cut_key = jax.random.split(key, 3)
  centre = jax.random.randint(
      cut_key, (num, 2), 0, jnp.array([height, width])[None]
  )
  low, high = centre - side // 2, centre + (side + 1) // 2
  rows, cols = jnp.arange(height)[None], jnp.arange(width)[None]
  in_rows = (rows >= low[:, :1]) & (rows < high[:, :1])
  in_cols = (cols >= low[:, 1:]) & (cols < high[:, 1:])
  hole = in_rows[:, :, None, None] & in_cols[:, None, :, None]
  return jnp.where(hole, jnp.zeros((), images.dtype), images)


def unchanged(features, key=None):
  """Returns the stored features unchanged."""
  del key
  return features


def _without_labels(
    labels: np.ndarray, parts: Sequence[np.ndarray], public: np.ndarray
) -> np.ndarray:
  """Labels without those of the public set, which no client may have."""
  for k, part in enumerate(parts):
    if (both := np.intersect1d(part, public)).size:
      raise ValueError(
          f'Client {k} has example {both[0]} of the public set, whose label '
          'public_labels=False hides.'
      )
  labels = labels.copy()
  labels[public] = NO_LABEL if labels.dtype.kind == 'i' else np.nan
  return labels


def federate(
    images: np.ndarray,
    labels: np.ndarray,
    parts: Sequence[np.ndarray],
    preprocess: Callable[..., jax.Array] = unchanged,
    public: np.ndarray | None = None,
    *,
    num_classes: int | None = None,
    allow_empty: bool = False,
    public_labels: bool = True,
) -> FederatedData:
  """Puts a data set and its partition on the device.

  Args:
    images: [N, ...] features: floats, integers or bools of any rank, such as
      [N, H, W, C] uint8 images. They are stored in their own type (64-bit types
      in 32 bits).
    labels: [N, ...] integers, or real numbers for a task that accepts them.
    parts: One array of example indices per client.
    preprocess: Maps stored features to a model's inputs, see `ClientData`;
      `make_preprocess` chooses one by the features' type.
    public: [P] indices of the public set, or None.
    num_classes: Number of classes, to check the labels; None checks only that
      classes are not negative. A round checks them against the models.
    allow_empty: Whether a client may have no example, as in a test set. Such a
      client cannot train.
    public_labels: False replaces the labels of the public set by `NO_LABEL`, or
      by NaN if labels are real numbers. The cross-entropy of such a label is
      NaN.

  Returns:
    The federated data. The length of the index rows is the size of the largest
    client, rounded up to a power of two.

  Raises:
    ValueError: If features and labels differ in number, are not numbers, or are
      not finite; if a label is out of range, there is no client, a client has
      no example (unless `allow_empty`), or an index lies outside the data set;
      if a client has an example of a public set without labels; or if
      `preprocess` is not a function.
  """
  if not callable(preprocess):
    raise ValueError(
        'preprocess must be a function, such as make_preprocess(images) '
        f'returns, got {shown(preprocess)}.'
    )
  images = arrays.features(images)
  labels = arrays.labels(labels, len(images), num_classes)
  parts = arrays.parts(parts, len(images), allow_empty)
  if public is not None:
    public = arrays.indices(public, len(images), 'the public set')
    if not public_labels:
      labels = _without_labels(labels, parts, public)
  used = labels[np.concatenate(parts if public is None else [*parts, public])]
  largest = int(used.max()) if used.size and used.dtype.kind == 'i' else None
  sizes = np.array([len(part) for part in parts], np.int32)
  # A power of two, so that partitions of other seeds mostly have equal shapes
  # and need no new compilation. Results do not depend on the padding.
  width = 1 << int(max(sizes.max(), 1) - 1).bit_length()
  # Padding must have a label: the gradient of a masked mean is NaN if a masked
  # loss is NaN.
  padding = 0 if public_labels else next((i for part in parts for i in part), 0)
  index = np.full((len(parts), width), padding, np.int32)
  for row, part in zip(index, parts, strict=True):
    row[: len(part)] = part
  # `jnp.asarray` would compile a program for each shape.
  on_device = functools.partial(jax.device_put, may_alias=False)
  return FederatedData(
      *on_device((images, labels, index, sizes)),
      preprocess,
      None if public is None else on_device(public),
      largest,
  )
