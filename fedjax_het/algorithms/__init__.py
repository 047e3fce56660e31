"""The federated algorithms: `ALGORITHMS` maps a name to its constructor.

A constructor is called as `ALGORITHMS[name](federation, **options)` and
returns a `FederatedAlgorithm`; its keyword-only parameters are its options.
Adding a method takes a module in this folder and a line here; if its clients
can keep their optimisers between visits, also a line in `KEEP_OPTIMIZER`, which
says whether they do by themselves.
"""

from collections.abc import Callable

from fedjax_het.algorithms.fd import fd
from fedjax_het.algorithms.fedasync import fedasync
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedepth import fedepth
from fedjax_het.algorithms.fedgkt import fedgkt
from fedjax_het.algorithms.fedhe import fedhe
from fedjax_het.algorithms.fedin import fedin
from fedjax_het.algorithms.fedmd import fedmd
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.algorithms.heterofl import heterofl
from fedjax_het.algorithms.private import private
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.algorithms.splitmix import splitmix
from fedjax_het.engine.types import FederatedAlgorithm

ALGORITHMS: dict[str, Callable[..., FederatedAlgorithm]] = {
    'private': private,
    'fedavg': fedavg,
    'fedprox': fedprox,
    'scaffold': scaffold,
    'fedin': fedin,
    'fedhe': fedhe,
    'fd': fd,
    'fedmd': fedmd,
    'fedgkt': fedgkt,
    'fedasync': fedasync,
    'fedepth': fedepth,
    'heterofl': heterofl,
    'splitmix': splitmix,
}

# Methods that obey `LocalTraining.keep_optimizer`, and what they do by
# themselves. All others begin the optimiser anew in each visit.
KEEP_OPTIMIZER = {
    'private': False,
    'fedavg': False,
    'fedprox': False,
    'fedasync': False,
    'fedhe': True,
    'fd': True,
    'fedmd': True,
    'fedgkt': True,
}

__all__ = ['ALGORITHMS', 'KEEP_OPTIMIZER', *ALGORITHMS]
