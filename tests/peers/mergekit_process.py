"""mergekit in a process of its own environment, started once: its imports take most of the time."""

import atexit
import json
import os
import subprocess
from functools import cache
from pathlib import Path

MERGEKIT = Path(
    os.environ.get("MERGEKIT_YAML", Path(__file__).parents[2] / ".peers" / "bin" / "mergekit-yaml")
)
IS_THERE = MERGEKIT.exists()
WHY_NOT = "mergekit is not installed; scripts/peers installs it"
_SCRIPT = """
import json
import sys
import traceback
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    recipe, out = json.loads(line)
    error = ""
    try:
        with open(recipe) as file:
            config = MergeConfiguration.model_validate(yaml.safe_load(file))
        options = MergeOptions(quiet=True, write_model_card=False, lora_merge_cache=out + "-folded")
        run_merge(config, out, options)
    except Exception:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""


@cache
def _process() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [MERGEKIT.with_name("python"), "-c", _SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )
    atexit.register(process.communicate)
    return process


def merge_by_mergekit(recipe: Path, out: Path) -> None:
    """Let mergekit merge what its YAML says."""
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(recipe), str(out)]) + "\n")
    process.stdin.flush()
    error = json.loads(process.stdout.readline())
    assert not error, error
