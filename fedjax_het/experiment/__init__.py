"""Runs experiments: from a config to a workdir with metrics and a report."""

from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.checks import check
from fedjax_het.experiment.config import algorithm_config, default_config
from fedjax_het.experiment.load import Model, Run, load_run
from fedjax_het.experiment.progress import Progress
from fedjax_het.experiment.runner import Result, run
from fedjax_het.experiment.workdir import new_workdir
from fedjax_het.reporting import paper_targets, sweep_report, tables
from fedjax_het.reporting.comparison import write_comparison
from fedjax_het.reporting.report import write_report
from fedjax_het.reporting.summary import Summary, summarise

__all__ = [
    'Experiment',
    'Model',
    'Progress',
    'Result',
    'Run',
    'Summary',
    'algorithm_config',
    'build',
    'check',
    'default_config',
    'load_run',
    'new_workdir',
    'paper_targets',
    'run',
    'summarise',
    'sweep_report',
    'tables',
    'write_comparison',
    'write_report',
]
