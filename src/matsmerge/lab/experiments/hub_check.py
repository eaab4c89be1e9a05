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
    wanted = list(dict.fromkeys(_wanted(suite, local)))
    if not wanted:
        return
    missing = [
        f"{name} ({what})"
        for kind, name, what in wanted
        if not _is_cached(kind, name) and not _is_there(kind, name)
    ]
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
    """Kind, id, and what it is for."""
    bases = [v.base or suite.base for v in suite.variants.values()]
    for base in bases if local.base is None else ():
        if isinstance(base, str) and not Path(base).expanduser().exists():
            yield "model", _id(base), "base model"
    for variant in suite.variants.values():
        for of, model in (variant.models or {}).items():
            if not Path(model).expanduser().exists():
                yield "model", _id(model), f"model of {of}"
    for name, task in suite.tasks.items():
        if name in local.data or task.source is not None or task.data is None:
            continue
        sources = task.data.values() if isinstance(task.data, dict) else [task.data]
        for source in sources:
            if not Path(source).expanduser().exists():
                yield "dataset", _id(source), f"data of {name}"


def _id(name: str) -> str:
    """`owner/name` of `owner/name:config@revision`."""
    return name.split("@")[0].split(":")[0]


def _is_cached(kind: str, name: str) -> bool:
    scan = import_optional("huggingface_hub").scan_cache_dir
    try:
        repos = scan().repos
    except Exception:  # there is no cache yet
        return False
    return any(repo.repo_type == kind and repo.repo_id == name for repo in repos)


def _is_there(kind: str, name: str) -> bool:
    try:
        import_optional("huggingface_hub").HfApi().repo_info(name, repo_type=kind, timeout=10)
    except Exception:  # no network, no such repository, no permission: each its own type
        return False
    return True
