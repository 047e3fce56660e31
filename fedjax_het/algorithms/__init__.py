"""The federated algorithms: `ALGORITHMS` maps a name to its constructor.

A constructor is called as `ALGORITHMS[name](federation, **options)` and
returns a `FederatedAlgorithm`; its keyword-only parameters are its options.
To add a method, add a module to this folder and a line at the end, since its
place gives its colour in pictures. The decorator `engine.needs.requires`
declares what a method needs from a federation.
"""

from collections.abc import Callable

from fedjax_het.algorithms.depthfl import depthfl
from fedjax_het.algorithms.fccl import fccl
from fedjax_het.algorithms.fd import fd
from fedjax_het.algorithms.fedasync import fedasync
from fedjax_het.algorithms.fedat import fedat
from fedjax_het.algorithms.fedaux import fedaux
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddf import feddf
from fedjax_het.algorithms.feddpa import feddpa
from fedjax_het.algorithms.feddyn import feddyn
from fedjax_het.algorithms.fedepth import fedepth
from fedjax_het.algorithms.fedet import fedet
from fedjax_het.algorithms.fedfomo import fedfomo
from fedjax_het.algorithms.fedgen import fedgen
from fedjax_het.algorithms.fedgkt import fedgkt
from fedjax_het.algorithms.fedh2l import fedh2l
from fedjax_het.algorithms.fedhe import fedhe
from fedjax_het.algorithms.fedin import fedin
from fedjax_het.algorithms.fedmd import fedmd
from fedjax_het.algorithms.fedmk import fedmk
from fedjax_het.algorithms.fednova import fednova
from fedjax_het.algorithms.fedproto import fedproto
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.algorithms.fedrolex import fedrolex
from fedjax_het.algorithms.fedselect import fedselect
from fedjax_het.algorithms.felo import felo
from fedjax_het.algorithms.fjord import fjord
from fedjax_het.algorithms.fml import fml
from fedjax_het.algorithms.heterofl import heterofl
from fedjax_het.algorithms.inclusivefl import inclusivefl
from fedjax_het.algorithms.incoavg import incoavg
from fedjax_het.algorithms.moon import moon
from fedjax_het.algorithms.private import private
from fedjax_het.algorithms.rhfl import rhfl
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.algorithms.scalefl import scalefl
from fedjax_het.algorithms.slimfl import slimfl
from fedjax_het.algorithms.splitmix import splitmix
from fedjax_het.engine.types import FederatedAlgorithm

ALGORITHMS: dict[str, Callable[..., FederatedAlgorithm]] = {
    'private': private,
    'fedavg': fedavg,
    'fedprox': fedprox,
    'scaffold': scaffold,
    'fednova': fednova,
    'feddyn': feddyn,
    'moon': moon,
    'incoavg': incoavg,
    'fedin': fedin,
    'fedfomo': fedfomo,
    'feddpa': feddpa,
    'fedselect': fedselect,
    'fedhe': fedhe,
    'felo': felo,
    'fd': fd,
    'fedproto': fedproto,
    'fedmd': fedmd,
    'rhfl': rhfl,
    'fedh2l': fedh2l,
    'fccl': fccl,
    'fml': fml,
    'fedgkt': fedgkt,
    'fedgen': fedgen,
    'feddf': feddf,
    'fedet': fedet,
    'fedasync': fedasync,
    'fedepth': fedepth,
    'heterofl': heterofl,
    'fedrolex': fedrolex,
    'fjord': fjord,
    'slimfl': slimfl,
    'inclusivefl': inclusivefl,
    'depthfl': depthfl,
    'scalefl': scalefl,
    'splitmix': splitmix,
    'fedat': fedat,
    'fedaux': fedaux,
    'fedmk': fedmk,
}

__all__ = ['ALGORITHMS', *ALGORITHMS]
