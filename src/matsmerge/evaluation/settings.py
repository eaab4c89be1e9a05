"""How models are run to be scored, and with what."""

from dataclasses import dataclass

import torch

from matsmerge.tasks.optional_import import import_optional
from matsmerge.version import __version__


@dataclass(frozen=True)
class Settings:
    """How models are run."""

    num_examples: int | None = None  # the first so many; None: all
    batch_size: int = 32
    max_tokens: int = 4096
    device: str | None = None
    dtype: str | None = None


def versions() -> dict[str, str]:
    """Of the libraries that scores depend on."""
    transformers = import_optional("transformers")
    return {
        "matsmerge": __version__,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }
