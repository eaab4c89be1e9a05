"""Models on the Hugging Face hub."""

from pathlib import Path

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import CheckpointError

# What belongs to a model besides its weights.
COMPANION_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


def download(name: str, revision: str | None) -> Path:
    """Download `owner/name` (or find it in the cache) and return its folder.

    Safetensors are preferred; pickled weights are fetched only where there is nothing else.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        for weights in ("*.safetensors", "*.bin"):
            wanted = [*COMPANION_PATTERNS, weights]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
            if any(folder.glob(weights)):
                break
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name}: no such local path, and the hub did not provide it{at} "
            f"({first_line(error)}); check the spelling, the network, "
            "and `hf auth login` for a private model"
        ) from error
    return folder
