"""Models with and without running statistics of their norms."""

from fedjax_het.models.blocks import BlockModel
from fedjax_het.models.slices import change_modules


def without_running_stats(model: BlockModel) -> BlockModel:
  """The model with every 'batch' norm turned into 'batch_only'.

  Args:
    model: A model.

  Returns:
    A model with the same parameters that never keeps running statistics.

  Raises:
    ValueError: If a module keeps running statistics, but not by a field `norm`
      that is 'batch'.
  """
  stats = model.abstract_variables.stats

  def plain(name, module):
    if getattr(module, 'norm', None) == 'batch':
      return module.clone(norm='batch_only')
    if name in stats:
      raise ValueError(
          f'Block {name!r} of {model.name!r} keeps running statistics, which '
          f"width methods train without; give {type(module).__name__} a field "
          "norm, 'batch' there and 'batch_only' without them."
      )
    return module

  return change_modules(model, plain)


def with_running_stats(model: BlockModel) -> BlockModel:
  """The model with every 'batch_only' norm turned into 'batch'.

  Args:
    model: A model.

  Returns:
    A model with the same parameters.
  """

  def keeping(name, module):
    del name
    if getattr(module, 'norm', None) == 'batch_only':
      return module.clone(norm='batch')
    return module

  return change_modules(model, keeping)
