"""Makes `configs/` importable as `fedjax_het.configs` in a checkout.

An installed wheel holds the files of `configs/` in place of this one.
"""

import pathlib

__path__ = [str(pathlib.Path(__file__).resolve().parents[2] / 'configs')]
