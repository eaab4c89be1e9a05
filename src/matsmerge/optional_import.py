"""Imports of libraries that only some features need."""

import importlib
from typing import Any

from matsmerge.errors import DataError

EXTRAS = {
    "optuna": "lab",
    "lm_eval": "lm-eval",
    **dict.fromkeys(("aiohttp", "fsspec", "s3fs"), "remote"),
    "gcsfs": "gs",
    "adlfs": "az",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def import_optional(module: str) -> Any:
    """Import a module of an extra (`hf`, unless listed); the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "pillow"}.get(module.partition(".")[0], module.partition(".")[0])
        raise DataError(
            f"this needs {package}, which cannot be imported ({error}); "
            f"install it with `pip install 'matsmerge[{EXTRAS.get(package, 'hf')}]'`"
        ) from error
