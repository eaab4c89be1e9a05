"""All drills at full length; `scripts/drills` runs this."""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from drills.arena import Tally
from drills.bombs import drill_bombs
from drills.kills import drill_kills
from drills.mutants import drill_mutants
from drills.signals import drill_signals
from drills.yard import make_yard


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill, damage, bomb and interrupt matsmerge.")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--mutants", type=int, default=3000)
    parser.add_argument("--signals", type=int, default=60)
    parser.add_argument("--no-bombs", action="store_true")
    parser.add_argument("--ray-kills", type=int, default=0, help="needs matsmerge[ray]")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"seed {options.seed}", flush=True)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="matsmerge-drills-") as folder:
        place = Path(folder)
        if options.ray_kills:
            return _drill_on_ray(place, options)
        yard = make_yard(place / "yard")
        # Two at a time: kills and signals mostly wait.
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
            rest = pool.submit(_drill_the_rest, yard, place, options)
            mutants = pool.submit(
                drill_mutants, yard, place / "mutants", options.seed, options.mutants
            )
            tallies = [mutants.result(), *rest.result()]
    for tally in tallies:
        tally.report(lambda line: print(line, flush=True))
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if any(tally.violations for tally in tallies) else 0


def _drill_on_ray(place: Path, options: argparse.Namespace) -> int:
    """By itself, for the other drills fork, which a process connected to Ray cannot."""
    from drills.ray_kills import drill_ray_kills

    tally = drill_ray_kills(place, options.seed, options.ray_kills)
    tally.report(lambda line: print(line, flush=True))
    return 1 if tally.violations else 0


def _drill_the_rest(yard: Path, place: Path, options: argparse.Namespace) -> list[Tally]:
    tallies = [drill_bombs(yard, place / "bombs")] if not options.no_bombs else []
    if options.signals:
        tallies.append(drill_signals(yard, place / "signals", options.seed, options.signals))
    if options.kills:
        tallies += drill_kills(yard, place / "kills", options.seed, options.kills)
    return tallies


if __name__ == "__main__":
    sys.exit(main())
