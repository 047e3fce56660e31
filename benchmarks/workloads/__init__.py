"""The workloads of `benchmarks.engine` by name."""

from benchmarks.workloads import averaging, fedepth, fedhe, fedin
from benchmarks.workloads.base import Workload

WORKLOADS = {
    'fedin': Workload(fedin.case, fedin.CASES, ('resnet10',)),
    'fedepth': Workload(fedepth.case, tuple(fedepth.BUDGETS), ('budget_1_2',)),
    'fedhe': Workload(fedhe.case, fedhe.CASES, fedhe.CASES),
    'simulation': Workload(averaging.simulation, ('cifar10',), ('cifar10',)),
    'many': Workload(averaging.many, ('cohort',), ('cohort',)),
}
