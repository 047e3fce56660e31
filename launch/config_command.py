"""The command line of programs that read one config."""

from collections.abc import Sequence
import sys

from absl import flags

from . import config_flag, terminal
from .terminal import CommandError

CONFIG = config_flag.define()
_PLAN = flags.DEFINE_enum(
    'plan',
    None,
    ('paper', 'measured'),
    "Memory estimate of FeDepth's schedules; else as the config says.",
)


def read_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser, with the default config.

  Args:
    argv: The command line.

  Returns:
    The arguments that are not flags: only the program's name.

  Raises:
    CommandError: If the command line or the config is wrong; one line.
  """
  argv = config_flag.with_config(terminal.with_flagfiles(argv))
  notes = config_flag.check(argv)
  sys.argv = argv  # The config flag reads its overrides from there.
  rest = terminal.read_expanded(argv)
  if len(rest) > 1:
    raise CommandError(
        f'Unexpected argument {rest[1]!r}; options look like --workdir=DIR.'
    )
  if _PLAN.value is not None:
    section = CONFIG.value.algorithm
    if 'plan' not in section:
      raise CommandError(f'--plan is for fedepth, not for {section.name}.')
    section.plan = _PLAN.value
  for note in notes:
    print(f'Note: {note}', file=sys.stderr)
  return rest


def parse_flags(argv: Sequence[str]) -> list[str]:
  """`read_flags`, which ends the process with one line if they are wrong."""
  try:
    return read_flags(argv)
  except CommandError as e:
    terminal.fail(e)
