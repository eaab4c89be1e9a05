"""Merging models in S3 against reading them: how much of the store's speed is left.

    python benchmarks/remote_throughput.py

starts moto's S3 server on loopback, stores models in it, and then in turns

- reads all bytes with plain s3fs, eight ranges of 8 MiB at once, and drops them;
- merges them by averaging with `matsmerge.merge`, from an empty cache into a local folder.

Before that a dry run of the first model is made, and the bytes that the server sent are counted by
a proxy. Moto is a Python program on the same processor, so that figures say how much we add to the
store's own work, not how fast S3 is. It needs `pip install 'matsmerge[dev]'`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ray_clusters import processor_seconds
from s3_server import CREDENTIALS, Proxy, s3_server

RANGE_BYTES = 8 * 2**20
GOAL = 2.0


def make_models(folder: Path, num_models: int, num_bytes: int) -> list[Path]:
    """Folders of models in shards of 50 MB; of larger ones moto copies all for every range."""
    import torch
    from safetensors.torch import save_file

    made = []
    num_shards = max(1, num_bytes // 50_000_000)
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for m in range(num_models):
        made.append(folder / f"m{m}")
        made[-1].mkdir()
        generator = torch.Generator().manual_seed(m)
        values = torch.randn(num_bytes // num_shards // 8, generator=generator).bfloat16()
        weight_map: dict[str, str] = {}
        for i, name in enumerate(names):
            state = {f"layers.{4 * i + k}.w": values.roll(4 * i + k) for k in range(4)}
            save_file(state, made[-1] / name)
            weight_map |= dict.fromkeys(state, name)
        index = made[-1] / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    return made


def read_plainly(models: list[str]) -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    ranges = [
        (name, start, start + RANGE_BYTES)
        for model in models
        for name in store.find(f"bucket/{model}")
        for start in range(0, store.size(name), RANGE_BYTES)
    ]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda one: store.cat_file(one[0], start=one[1], end=one[2]), ranges):
            pass  # dropped as they come


def merge(models: list[str], folder: Path) -> None:
    import matsmerge

    matsmerge.merge(
        [f"s3://bucket/{model}" for model in models], out=folder / "merged", overwrite=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1000, help="of each model")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, s3_server() as port, Proxy(port) as proxy:
        folder = Path(scratch)
        os.environ |= {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        os.environ["MATSMERGE_CACHE"] = str(folder / "cache")
        import s3fs

        import matsmerge

        assert callable(matsmerge.merge)  # imported before time is taken
        patient = {"connect_timeout": 300, "read_timeout": 300}
        store = s3fs.S3FileSystem(config_kwargs=patient)
        store.mkdir("bucket")
        models = make_models(folder, asked.models, asked.megabytes * 1_000_000)
        for path in (path for model in models for path in sorted(model.iterdir())):
            store.put_file(str(path), f"bucket/{path.parent.name}/{path.name}", chunksize=2**28)
            path.unlink()
        command = [
            sys.executable,
            "-m",
            "matsmerge",
            "merge",
            "--dry-run",
            "--model",
            "s3://bucket/m0",
        ]
        counted = {**os.environ, "AWS_ENDPOINT_URL": proxy.address}
        subprocess.run(command, env=counted, check=True, stdout=subprocess.DEVNULL)
        moved = sum(num for method, _, _, num in proxy.answers if method == "GET")
        print(f"a dry run of {asked.megabytes} MB: {len(proxy.answers)} requests, {moved:,} bytes")
        names = [model.name for model in models]
        work: dict[str, Callable[[], None]] = {
            "reading": lambda: read_plainly(names),
            "merging": lambda: merge(names, folder),
        }
        clocks: dict[str, list[float]] = {what: [] for what in work}
        processors: dict[str, list[float]] = {what: [] for what in work}
        for _ in range(asked.rounds):
            for what, call in work.items():
                shutil.rmtree(os.environ["MATSMERGE_CACHE"], ignore_errors=True)
                clock, everyone, own = time.monotonic(), processor_seconds(), time.process_time()
                call()
                own = time.process_time() - own
                processors[what].append(processor_seconds() - everyone)
                clocks[what].append(time.monotonic() - clock)
                rate = asked.models * asked.megabytes / clocks[what][-1]
                print(
                    f"{what}: {clocks[what][-1]:.1f} s, {rate:.0f} MB/s; processors "
                    f"{processors[what][-1]:.1f} s, {own:.1f} s of them ours",
                    flush=True,
                )
        by_clock, by_processor = (
            statistics.median(found["merging"]) / statistics.median(found["reading"])
            for found in (clocks, processors)
        )
        print(
            f"merging takes {by_clock:.2f} times as long as reading with s3fs (goal: {GOAL}), and "
            f"{by_processor:.2f} times the processor time, the server's included"
        )


if __name__ == "__main__":
    main()
