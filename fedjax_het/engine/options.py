"""TEMPORARY: `fedjax_het.options` under its old name, until all import that."""

from fedjax_het.options import (  # noqa: F401
  INT32_MAX,
  at_least,
  between,
  check_float32,
  is_finite,
  not_negative,
  one_of,
  positive,
  shares,
)
