"""Publishing on the Hugging Face hub: a model's folder or a file of statistics, in one commit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.engine.companion_files import loader_of
from matsmerge.errors import MatsError, OutputError
from matsmerge.files.guarded_files import reading
from matsmerge.files.mirror import fetch_path, fetch_whole
from matsmerge.markdown_text import escape
from matsmerge.statistics.statistics_file import BESIDE, is_statistics_file, open_statistics

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_CARD = "README.md"
# Weights of an earlier push: beside new ones they could be taken for the model.
_WEIGHTS = re.compile(r"(adapter_|pytorch_)?model\b.*\.(safetensors|bin)(\.index\.json)?")


def push(
    source: str | Path,
    repo: str,
    *,
    statistics: str | Path | None = None,
    public: bool = False,
) -> str:
    """Publish a model's folder, or a file of statistics, and return the address of the commit.

    `repo` is `owner/name`; it is made if it is not there, private unless `public`. The `statistics`
    are put beside the model, where everyone who merges it finds them. A folder without a card gets
    a short one; hidden files stay here. Everything appears at once or not at all.
    """
    path = local_path(source)
    with reading(path, OutputError):
        fetch_path(path, whole=True)
    is_model = not is_statistics_file(path)
    files = _model_files(path) if is_model else {BESIDE: path}
    if statistics is not None:
        open_statistics(statistics)
        files[BESIDE] = local_path(statistics)
    api = check_repo(repo)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with reading(path, OutputError):
        operations: list[Any] = [
            CommitOperationAdd(name, str(fetch_whole(file))) for name, file in files.items()
        ]
    if is_model and _CARD not in files:
        operations.append(CommitOperationAdd(_CARD, _short_card(path, repo).encode()))
    with _refusals(repo):
        api.create_repo(repo, private=not public, exist_ok=True)
        if not (public or api.repo_info(repo).private):
            raise OutputError(f"{repo}: is there already, and public; say so with --public")
        if is_model:
            operations += [
                CommitOperationDelete(name)
                for name in api.list_repo_files(repo)
                if _WEIGHTS.fullmatch(name) and name not in files
            ]
        message = f"Upload {path.name} with matsmerge"
        return str(api.create_commit(repo, operations, commit_message=message).commit_url)


def check_repo(repo: str) -> "HfApi":
    """Refuse a name that cannot be pushed to, or a user who is not logged in; the hub's client."""
    from huggingface_hub import HfApi

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise OutputError(f"{repo}: expected the name of a repository, such as owner/name")
    api = HfApi()
    with _refusals(repo):
        api.whoami()
    return api


def _model_files(folder: Path) -> dict[str, Path]:
    """The files to publish, by their names in the repository."""
    if not folder.is_dir():
        raise OutputError(f"{folder}: expected a model's folder or a file of statistics")
    open_checkpoint(folder)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in found}
    return {n: path for n, path in names.items() if not re.search(r"(^|/)\.", n)}


def _short_card(folder: Path, repo: str) -> str:
    library, _ = loader_of(folder)
    front = {**({"library_name": library} if library else {}), "tags": ["matsmerge"]}
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {escape(repo)}\n"


@contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """Turn what the hub or its client refuses into an error that says what to do."""
    try:
        yield
    except MatsError:
        raise
    except Exception as error:  # of several libraries, by the client's version
        raise OutputError(
            f"{repo}: the hub did not accept it ({first_line(error)}); check the name, the "
            "network, and `hf auth login` with a token that may write"
        ) from error
