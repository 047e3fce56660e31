"""Tasks for `benchmarks.accelerator.worker` that end in every way."""

import os
import time


def works(number):
  return dict(number=number, pid=os.getpid(), jax=os.getenv('JAX_PLATFORMS'))


def skips():
  return dict(status='skipped', error='there is nothing to do')


def raises():
  raise MemoryError('no room\nat all')


def crashes():
  os.abort()


def hangs():
  time.sleep(1000)
