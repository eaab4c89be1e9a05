"""Which models are compared, under which names."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matsmerge.checkpoints.public_names import path_names
from matsmerge.checkpoints.source import local_path
from matsmerge.errors import DataError
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL

Models = Sequence[str | Path] | Mapping[str, str | Path]


def name_models(models: Models) -> dict[str, str]:
    """Models by name: as given, or by as few last parts of their paths as tell them apart."""
    if isinstance(models, (str, Path)):
        raise DataError("models must be a list of paths, or a mapping from names to paths")
    if isinstance(models, Mapping):
        named = {str(name): str(source) for name, source in models.items()}
    else:
        sources = [str(source) for source in models]
        twice = sorted({source for source in sources if sources.count(source) > 1})
        if twice:
            raise DataError([f"{source}: the model is given twice" for source in twice])
        named = dict(zip(_short_names(sources), sources, strict=True))
    problems = [
        f"a model may not be named '{name}'; name it as in other={source}"
        for name, source in named.items()
        if name in (INDIVIDUAL, ENSEMBLE) or not re.fullmatch(r"[\w][\w.-]*", name)
    ]
    if not named:
        problems.append("give at least one model")
    if problems:
        raise DataError(problems)
    return named


def parse_named(arguments: Sequence[str]) -> dict[str, str]:
    """Models from a command line: `PATH`, or `NAME=PATH`."""
    pairs: list[tuple[str | None, str]] = []
    for argument in arguments:
        name, equals, source = argument.partition("=")
        is_named = bool(equals) and not local_path(argument).exists()
        pairs.append((name, source) if is_named else (None, argument))
    short = name_models([source for name, source in pairs if name is None] or ["model"])
    by_source = {source: name for name, source in short.items()}
    names = [by_source[source] if name is None else name for name, source in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            [f"two models are named '{n}'; name them apart as in {n}-2=PATH" for n in twice]
        )
    return name_models(dict(zip(names, (source for _, source in pairs), strict=True)))


def _short_names(paths: Sequence[str]) -> list[str]:
    for names in path_names(paths):
        if len(set(names)) == len(names) and all(names):
            return names
    twice = ", ".join(paths)
    raise DataError(f"models of one name: {twice}; name them apart as in NAME=PATH")
