"""Makes `launch/` importable as `fedjax_het.launch` in a checkout.

An installed wheel holds the files of `launch/` in place of this one.
"""

import pathlib

__path__ = [str(pathlib.Path(__file__).resolve().parents[2] / 'launch')]
