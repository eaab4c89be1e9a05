"""Packages with files of a test's own."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_packages import deb_of, tar_of, zip_of

from matsmerge.lab.experiments.packages import PACKAGES

Put = Callable[[str, dict[str, bytes]], None]


def putting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """What has a package hold these files, as if it had been fetched."""
    monkeypatch.setenv("MATSMERGE_CACHE", str(folder / "cache"))
    (folder / "cache/packages").mkdir(parents=True)
    makers = {".whl": zip_of, ".deb": deb_of, ".gz": tar_of, ".tgz": tar_of}

    def put(name: str, files: dict[str, bytes]) -> None:
        package = PACKAGES[name]
        content = makers[Path(package.file).suffix](files)
        (folder / "cache/packages" / package.file).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(PACKAGES, name, replace(package, sha256=digest))

    return put


def texts_of(folder: Path) -> dict[str, str]:
    """Labels by text, as a source wrote them, each text once."""
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    texts = {row["text"]: row["label"] for row in rows}
    assert len(texts) == len(rows)
    return texts
