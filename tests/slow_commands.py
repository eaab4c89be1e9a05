"""`mats` with merges slow enough to be interrupted, as a program for `python -c`."""

SLOW_MATS = """
import time
from matsmerge.cli import main
from matsmerge.engine import worker
merge = worker.Worker.merge
def slow(self, job, **keywords):
    time.sleep(0.05)
    return merge(self, job, **keywords)
worker.Worker.merge = slow
main.main()
"""
