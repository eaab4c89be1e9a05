"""A check, before any work, that the hub has the models and data that a suite names."""

from collections.abc import Iterator
from pathlib import Path

from matsmerge.errors import DataError
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.lab.experiments.suite import Suite, suite_files
from matsmerge.lab.experiments.suite_setup import Local
from matsmerge.optional_import import import_optional


def check_hub(suite: Suite, local: Local) -> None:
    """Refuse all that is neither local nor on the hub; say which suites work without the hub."""
    wanted = {
        # An id is `owner/name` of `owner/name:config@revision`.
        (kind, source.split("@")[0].split(":")[0], what): None
        for kind, source, what in _wanted(suite, local)
        if not Path(source).expanduser().exists()
    }
    missing = [f"{name} ({what})" for kind, name, what in wanted if not _is_there(kind, name)]
    if missing:
        offline = [n for n, p in suite_files().items() if read_yaml(p, DataError).get("offline")]
        raise DataError(
            [
                f"{suite.name}: the Hugging Face hub was not reached, or does not have: "
                f"{', '.join(missing)}",
                "check the network and `hf auth login`, or give local folders with --base and "
                f"--data; without the hub work: {', '.join(offline)}",
            ]
        )


def _wanted(suite: Suite, local: Local) -> Iterator[tuple[str, str, str]]:
    """Kind, name of a file or of something on the hub, and what it is for."""
    for variant in suite.variants.values():
        base = variant.base or suite.base
        if local.base is None and isinstance(base, str):
            yield "model", base, "base model"
        for of, model in (variant.models or {}).items():
            yield "model", model, f"model of {of}"
    for name, task in suite.tasks.items():
        if name not in local.data and task.source is None:
            sources = task.data.values() if isinstance(task.data, dict) else [task.data]
            for source in sources:
                if source is not None:
                    yield "dataset", source, f"data of {name}"


def _is_there(kind: str, name: str) -> bool:
    """Whether it is in the cache, or on the hub."""
    hub = import_optional("huggingface_hub")
    try:
        cached = hub.scan_cache_dir().repos
    except Exception:  # there is no cache yet
        cached = ()
    if any(repo.repo_type == kind and repo.repo_id == name for repo in cached):
        return True
    try:
        hub.HfApi().repo_info(name, repo_type=kind, timeout=10)
    except Exception:  # no network, no such repository, no permission: each its own type
        return False
    return True
