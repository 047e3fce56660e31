"""Checks users' arrays: features, labels and indices."""

from collections.abc import Mapping, Sequence
import operator

import jax.numpy as jnp
import numpy as np

from fedjax_het.names import shown

# Types that JAX stores in place of 64-bit ones.
_NARROW = {'int64': np.int32, 'uint64': np.uint32, 'float64': np.float32}
_NARROW[np.dtype(np.longdouble).name] = np.float32


def features(values, name: str = 'images') -> np.ndarray:
  """Checks features of any rank; converts long types to 32-bit ones.

  Args:
    values: [N, ...] floats, integers or bools.
    name: Their name in messages.

  Returns:
    [N, ...] of the same type, in the machine's byte order; 64-bit types and
    longer ones become 32-bit ones.

  Raises:
    ValueError: If they are not an array of numbers, have no number per example,
      or hold NaN, infinity or numbers that 32 bits cannot hold.
  """
  array = _array(values, name)
  check_numbers(array, name)
  if not array.ndim:
    raise ValueError(f'{name} must be [N, ...], got the number {array}.')
  if 0 in array.shape[1:]:
    raise ValueError(
        f'{name} must hold at least one number an example, got shape '
        f'{array.shape}.'
    )
  narrow = np.dtype(_NARROW.get(array.dtype.name, array.dtype))
  narrow = narrow.newbyteorder('=')
  if narrow != array.dtype and narrow.kind in 'iu':
    _check_range(array, name, narrow)
  with np.errstate(over='ignore'):
    array = array.astype(narrow, copy=False)
  if jnp.issubdtype(narrow, np.floating):
    _check_finite(array, name)
  return array


def labels(
    values, num: int, num_classes: int | None = None, name: str = 'labels'
) -> np.ndarray:
  """Checks labels; stores integers and bools as int32, others as float32.

  Args:
    values: [N, ...] classes from 0 on, or real numbers. With several integers
      per example and without `num_classes`, negative ones are allowed; a user's
      task gives them a meaning.
    num: N, the expected number of labels.
    num_classes: Number of classes; None if it is not known, or if the labels
      are real numbers.
    name: Their name in messages.

  Returns:
    [N, ...] int32 or float32.

  Raises:
    ValueError: If there are not N labels, a class is out of range, or a number
      is not finite.
  """
  array = _array(values, name)
  if array.dtype.kind in 'OSUT':
    raise ValueError(
        f'{name} must be numbers, got dtype {array.dtype}; '
        'np.unique(labels, return_inverse=True)[1] numbers classes from 0 on.'
    )
  array = features(array, name)
  if num_classes is not None:
    num_classes = _count(num_classes)
  if len(array) != num:
    raise ValueError(
        f'{name} holds {len(array):,} entries for {num:,} examples.'
    )
  if jnp.issubdtype(array.dtype, np.floating):
    if num_classes is not None:
      raise ValueError(
          f'{name} must be integers in 0..{num_classes - 1} for {num_classes} '
          f'classes, got dtype {array.dtype} and shape {array.shape}.'
      )
    return array.astype(np.float32, copy=False)
  array = _check_range(array, name, np.dtype(np.int32)).astype(np.int32)
  # With several labels per example, a user's task may mark missing ones by
  # negative numbers.
  classes = array.ndim == 1 or num_classes is not None
  if classes and array.size and array.min() < 0:
    raise ValueError(
        f'{name} must be classes from 0 on, got {array.min()}; give floats for '
        'a task whose targets are real numbers.'
    )
  if num_classes is not None and array.size and array.max() >= num_classes:
    raise ValueError(
        f'{name} must lie in 0..{num_classes - 1} for {num_classes} classes, '
        f'got {array.max()}.'
    )
  return array


def indices(values, num: int, name: str) -> np.ndarray:
  """Checks indices of examples.

  Args:
    values: A sequence of integers.
    num: Number of examples.
    name: Their owner in messages, such as 'client 3'.

  Returns:
    [M] int32, may be empty.

  Raises:
    ValueError: If they are not a vector of integers in 0..num - 1.
  """
  array = _array(values, name)
  if not array.size and array.ndim == 1:
    return np.zeros(0, np.int32)
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    raise ValueError(
        f'{name} must be a list of example numbers, got shape {array.shape} '
        f'and dtype {array.dtype}.'
    )
  wrong = (array < 0) | (array >= num)
  if wrong.any():
    raise ValueError(
        f'{name} names example {array[wrong][0]}, but there are {num:,} '
        f'examples, 0..{num - 1}.'
    )
  return array.astype(np.int32)


def parts(
    values: Sequence, num: int, allow_empty: bool = False
) -> list[np.ndarray]:
  """Checks the indices of all clients.

  Args:
    values: One sequence of example numbers per client.
    num: Number of examples.
    allow_empty: Whether a client may have no example.

  Returns:
    One int32 array per client.

  Raises:
    ValueError: If there is no client, a client has no example and `allow_empty`
      is False, or an index is wrong.
  """
  if isinstance(values, Mapping | str) or not hasattr(values, '__len__'):
    raise ValueError(
        'parts must be a list of example numbers for each client, such as '
        f'`partition` returns, got {type(values).__name__}.'
    )
  if not len(values):
    raise ValueError('A federation needs at least one client, got none.')
  found = [indices(part, num, f'client {k}') for k, part in enumerate(values)]
  empty = [k for k, part in enumerate(found) if not len(part)]
  if empty and not allow_empty:
    raise ValueError(
        f'Client {empty[0]} has no example; each client needs one.'
    )
  return found


def _count(num_classes) -> int:
  try:
    return operator.index(num_classes)
  except TypeError:
    raise ValueError(
        f'num_classes must be an integer, got {shown(num_classes)}.'
    ) from None


def _array(values, name: str) -> np.ndarray:
  try:
    return np.asarray(values)
  except Exception as e:  # Other array libraries may raise any exception.
    raise ValueError(
        f'{name} must be one array: {shown(str(e).rstrip("."))}.'
    ) from e


def check_numbers(array, name: str) -> None:
  """Raises ValueError unless the dtype is a float, an integer or bool.

  Args:
    array: An array.
    name: Its name in the message.
  """
  kinds = (np.bool_, np.integer, np.floating)
  if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
    raise ValueError(
        f'{name} must be floats, integers or bools, got dtype {array.dtype}.'
    )


def _check_range(array, name: str, narrow: np.dtype) -> np.ndarray:
  """Raises ValueError for integers that a narrower type cannot hold."""
  if array.size and array.dtype.kind in 'iu':
    info = np.iinfo(narrow)
    low, high = int(array.min()), int(array.max())
    if low < info.min or high > info.max:
      raise ValueError(
          f'{name} must lie in {info.min}..{info.max}, which {narrow} holds, '
          f'got {low if low < info.min else high}.'
      )
  return array


def _check_finite(array: np.ndarray, name: str) -> None:
  """Raises ValueError for NaN and infinity, naming the first example."""
  finite = np.isfinite(array)
  if not finite.all():
    place = tuple(np.argwhere(~finite)[0])
    raise ValueError(
        f'{name} must be finite, got {array[place]} in example {place[0]}.'
    )
