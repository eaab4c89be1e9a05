"""Where outputs may be put, whatever makes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from matsmerge.errors import OutputError
from matsmerge.files.output_place import check_file, is_vacant
from matsmerge.lab.evaluation import results_folder
from matsmerge.lab.reports.report_files import Outputs
from matsmerge.lab.training.run_folder import RunFolder
from matsmerge.statistics.collection_run import check_output

CHECKS: list[tuple[str, Callable[[Path], None]]] = [
    ("", lambda target: RunFolder(target).check()),
    ("", lambda target: results_folder.check_results_target(target, overwrite=False)),
    (".safetensors", lambda target: check_output(target, overwrite=False, resume=False)),
    (".html", lambda target: Outputs(page=target).check(overwrite=False)),
]


@pytest.mark.parametrize(("suffix", "check"), CHECKS)
@pytest.mark.parametrize("length", [300, 240])
def test_names_that_are_too_long(
    tmp_path: Path, suffix: str, check: Callable[[Path], None], length: int
) -> None:
    with pytest.raises(OutputError, match="name that is too long"):
        check(tmp_path / ("x" * (length - len(suffix)) + suffix))
    check(tmp_path / ("x" * 200 + suffix))


@pytest.mark.parametrize("check", [check for suffix, check in CHECKS if not suffix])
def test_an_empty_folder_is_like_none(tmp_path: Path, check: Callable[[Path], None]) -> None:
    target = tmp_path / "out"
    target.mkdir()
    check(target)
    (target / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match="exists and"):
        check(target)


def test_vacant_places(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    vacant = [n for n in ("gone", "empty", "file", "link", "dangling") if is_vacant(tmp_path / n)]
    assert vacant == ["gone", "empty"]
    assert not is_vacant(Path("/"))


def test_names(tmp_path: Path) -> None:
    check_file(tmp_path / "out")
    for name in ("a\0b", f"{'x' * 300}/out"):
        with pytest.raises(OutputError):
            check_file(tmp_path / name)
