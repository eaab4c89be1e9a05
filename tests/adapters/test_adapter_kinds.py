"""That a new kind of adapter is one class and one line: LoHa, against PEFT."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_models import load, make_base
from torch import Tensor, nn

from matsmerge.adapters.adapted_checkpoint import AdaptedCheckpoint
from matsmerge.adapters.adapter import Adapter, AdapterContent, AdapterKind, Change, LowRankChange
from matsmerge.adapters.adapter_folder import ADAPTER_KINDS, open_base, read_adapter
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import CheckpointError
from matsmerge.lab.training.training_options import TrainingOptions


class LohaContent(AdapterContent):
    r: int
    alpha: float


@dataclass(frozen=True)
class Hadamard(LowRankChange):
    """Two products of factors, whose elements are multiplied."""

    a2: str
    b2: str


class Loha(AdapterKind):
    """W' = W + s (B1 A1) * (B2 A2)."""

    name = "loha"
    title = "LoHa"
    peft_type = "LOHA"
    content = LohaContent
    tensors = re.compile(r"^(?P<module>.+)\.hada_(?P<part>w[12]_[ab])$")

    def changes(
        self, adapter: Adapter, module: str, weight: str, base: Checkpoint
    ) -> dict[str, Change]:
        assert weight in base.specs
        parts, content = adapter.modules[module], adapter.config.content
        rank, scaling = content["r"], content["alpha"] / content["r"]
        names = (parts[name] for name in ("w1_b", "w1_a", "w2_b", "w2_a"))
        a, b, a2, b2 = names
        return {weight: Change(Hadamard(a, b, rank**2, scaling, a2, b2))}

    def factors(
        self, adapter: Checkpoint, change: LowRankChange, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(change, Hadamard)
        b, a, b2, a2 = (adapter[n].to(dtype) for n in (change.b, change.a, change.b2, change.a2))
        left = (b[:, :, None] * b2[:, None, :]).flatten(1) * change.scaling
        return left, (a[:, None, :] * a2[None, :, :]).flatten(0, 1)

    def peft_settings(
        self, peft: Any, model: nn.Module, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> Any:
        assert isinstance(model, nn.Module)
        assert "target_modules" in options
        return peft.LoHaConfig(**given)


@pytest.fixture
def loha(tmp_path: Path) -> Path:
    model = load(make_base("bert", tmp_path / "base"))
    settings = peft.LoHaConfig(r=2, alpha=5, target_modules=["query", "dense"])
    adapted: Any = peft.get_peft_model(model, settings)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "hada" in name:
            nn.init.normal_(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "loha")
    return tmp_path / "loha"


def test_a_new_kind(loha: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="of type LOHA; expected LORA or IA3"):
        read_adapter(open_checkpoint(loha))
    monkeypatch.setitem(ADAPTER_KINDS, "loha", Loha())
    adapter = read_adapter(open_checkpoint(loha))
    assert adapter is not None
    folded = AdaptedCheckpoint(open_base(adapter), adapter)
    whole: Any = peft.PeftModel.from_pretrained(load(loha.parent / "base"), str(loha))
    expected = whole.merge_and_unload().state_dict()
    assert len(folded.changed) > 3
    for name in folded.changed:
        torch.testing.assert_close(folded[name], expected[name], check_dtype=False)
    assert TrainingOptions(adapter="loha").adapter == "loha"
