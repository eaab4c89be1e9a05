"""Which models are compared, under which names."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matsmerge.checkpoints.public_names import path_names, split_name
from matsmerge.errors import DataError
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL

ComparedModels = str | Path | Sequence[str | Path] | Mapping[str, str | Path]


def name_models(models: ComparedModels) -> dict[str, str]:
    """Models, or one, by name: as given, or by as few last parts of paths as tell them apart."""
    if isinstance(models, (str, Path)):
        models = [models]
    if isinstance(models, Mapping):
        return _named([(str(name), str(source)) for name, source in models.items()])
    return _named([(None, str(source)) for source in models])


def parse_named(arguments: Sequence[str]) -> dict[str, str]:
    """Models from a command line: `PATH`, or `NAME=PATH`."""
    return _named([split_name(argument) for argument in arguments])


def _named(pairs: Sequence[tuple[str | None, str]]) -> dict[str, str]:
    unnamed = [source for name, source in pairs if name is None]
    if twice := _repeated(unnamed):
        raise DataError([f"{source}: the model is given twice" for source in twice])
    short = iter(_short_names(unnamed))
    named = [(next(short) if name is None else name, source) for name, source in pairs]
    problems = [
        f"two models are named '{name}'; name them apart as in {name}-2=PATH"
        for name in _repeated([name for name, _ in named])
    ]
    problems += [
        f"a model may not be named '{name}'; name it as in other={source}"
        for name, source in named
        if name in (INDIVIDUAL, ENSEMBLE) or not re.fullmatch(r"[\w][\w.-]*", name)
    ]
    if not named:
        problems.append("give at least one model")
    DataError.raise_all(problems)
    return dict(named)


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _short_names(paths: Sequence[str]) -> list[str]:
    for names in path_names(paths):
        if not _repeated(names) and all(names):
            return names
    raise DataError(f"models of one name: {', '.join(paths)}; name them apart as in NAME=PATH")
