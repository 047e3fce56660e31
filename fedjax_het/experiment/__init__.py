"""Experiments: from a config to a workdir with metrics and a report."""

from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.comparison import write_comparison
from fedjax_het.experiment.config import (
    algorithm_config,
    check,
    default_config,
)
from fedjax_het.experiment.metrics import Summary, summarise
from fedjax_het.experiment.progress import Progress
from fedjax_het.experiment.report import write_report
from fedjax_het.experiment.runner import Result, run
from fedjax_het.experiment.workdir import new_workdir

__all__ = [
    'Experiment',
    'Progress',
    'Result',
    'Summary',
    'algorithm_config',
    'build',
    'check',
    'default_config',
    'new_workdir',
    'run',
    'summarise',
    'write_comparison',
    'write_report',
]
