"""The colour and marker of each method, the same in every picture."""

import collections
from collections.abc import Mapping

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.analysis import pictures


def method_looks(
    method_of: Mapping[str, str], panel_of: Mapping[str, str] | None = None
) -> dict[str, pictures.Look]:
  """The looks of the labels that a picture or a table compares.

  A method's look follows from its place in `ALGORITHMS`. Labels of one method,
  such as rows with other options, share its colour and marker; they differ in
  dashes and in how markers are filled, in the given order. If all labels have
  the same method, they differ in colour instead.

  Args:
    method_of: {label: name of its method} of all labels.
    panel_of: {label: panel}, if labels are drawn in different panels; rows of
      one method in different panels may look alike. None for one panel.

  Returns:
    {label: look}.
  """
  if len(method_of) > 1 and len(set(method_of.values())) == 1:
    return pictures.looks_by_place(method_of)
  order = [*ALGORITHMS]
  order += sorted(set(method_of.values()) - set(order))
  looks, variants = {}, collections.Counter()
  for label, method in method_of.items():
    place = (panel_of or {}).get(label), method
    looks[label] = pictures.look(order.index(method), variants[place])
    variants[place] += 1
  return looks
