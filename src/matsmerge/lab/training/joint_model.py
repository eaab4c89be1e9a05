"""One encoder with a head for each task."""

from collections.abc import Sequence, Set

from torch import nn

from matsmerge.errors import DataError


class JointModel(nn.Module):
    """Models that share everything but their heads."""

    def __init__(self, models: Sequence[nn.Module], head: Set[str]) -> None:
        super().__init__()
        first = models[0]
        prefix = getattr(first, "base_model_prefix", "")
        if not isinstance(getattr(first, prefix, None), nn.Module):
            raise DataError(
                f"{type(first).__name__} has no encoder of its own beside its head, and cannot be "
                "trained on several tasks at once"
            )
        self.models = nn.ModuleList(models)
        for other in models[1:]:
            _share(first, other, head)

    @property
    def encoder(self) -> nn.Module:
        first = self.models[0]
        encoder: nn.Module = getattr(first, str(first.base_model_prefix))
        return encoder


def _share(first: nn.Module, other: nn.Module, head: Set[str]) -> None:
    """Let a model have the very parameters and buffers of another, but for its head's."""
    for name, parameter in list(first.named_parameters(remove_duplicate=False)):
        if name not in head:
            path, _, leaf = name.rpartition(".")
            setattr(other.get_submodule(path), leaf, parameter)
    for name, buffer in list(first.named_buffers(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        other.get_submodule(path)._buffers[leaf] = buffer
