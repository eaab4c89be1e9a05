"""Statistics of models whose embeddings get other rows: zero where a model has none.

A model then counts nothing for a row that it lacks: token counts of an embedding, the diagonal
Fisher and K-FAC's output factors are zero there (but for a ridge). Second moments of inputs count
a model for all outputs alike, so that with them alone every row must be in all models, or in one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.token_rows import PermutedRows, RowOrigins, TokenRows, resized
from matsmerge.errors import StatisticsError
from matsmerge.linalg.triangle import pack_upper, unpack_upper
from matsmerge.methods.layer import Layer, Round
from matsmerge.methods.objectives.objective import Evidence


def permute_evidence(
    rows: TokenRows, evidence: Sequence[Evidence], alignment: Alignment
) -> tuple[Evidence, ...]:
    """All statistics with the rows that embeddings get; there may be none."""
    return tuple(
        replace(one, statistics=replace(one.statistics, arrays=_permuted(rows, one, model)))
        for one, model in zip(evidence, alignment.models, strict=False)
    )


def _permuted(rows: TokenRows, evidence: Evidence, model: AlignedModel) -> Checkpoint:
    arrays, forms = evidence.statistics.arrays, evidence.statistics.header.forms
    number = rows.names.index(model.name)
    own, size = rows.own[number], rows.sizes[number]
    keys: set[str] = set()
    for name in _by_token(rows, model):
        kinds = ("fisher", "block_fisher")
        keys |= {f"{kind}/{n}" for kind in kinds for n in evidence.names_of(name)}
        for m in evidence.maps_of(name):
            keys.add(f"inputs/{m.inputs}" if m.layout == "embedding" else f"outputs/{m.module}")
    tables: dict[str, RowOrigins] = {}
    triangles: dict[str, Tensor] = {}
    problems = []
    for array, spec in arrays.specs.items():
        if array.partition("/")[2] not in keys:
            continue
        if forms[array] == "symmetric" and spec.shape == (size * (size + 1) // 2,):
            triangles[array] = own
        elif forms[array] in ("diagonal", "full", "sketch") and spec.shape[0] == size:
            nothing = torch.zeros(rows.num_rows, dtype=torch.bool)
            tables[array] = RowOrigins(own, (), nothing, (rows.num_rows, *spec.shape[1:]))
        else:
            problems.append(
                f"{evidence.label}: array '{array}' ({forms[array]}, {list(spec.shape)}) cannot be "
                f"brought to another vocabulary than that of {size:,} rows; leave its parameter "
                "out with an override"
            )
    StatisticsError.raise_all(problems)
    return _PermutedArrays(arrays, tables, triangles)


def _by_token(rows: TokenRows, model: AlignedModel) -> list[str]:
    """The parameters that have a row for each token of the output."""
    num = rows.num_rows
    return [n for n, own in model.names.items() if resized(own, model.spec(n), num, num)]


class _PermutedArrays(PermutedRows):
    """Arrays by token; `triangles` are of matrices (tokens, tokens)."""

    def __init__(
        self, of: Checkpoint, tables: Mapping[str, RowOrigins], triangles: Mapping[str, Tensor]
    ) -> None:
        super().__init__(of, tables)
        self._triangles = triangles
        for name, own in triangles.items():
            shape = (len(own) * (len(own) + 1) // 2,)
            self.specs = {**self.specs, name: TensorSpec(of.specs[name].dtype, shape)}

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        own = self._triangles.get(name)
        if own is None:
            super().read_into(buffer, name, start)
            return
        stored = unpack_upper(self.of[name])
        matrix = stored.new_zeros(len(own), len(own))
        at = (own >= 0).nonzero().flatten()
        matrix[at[:, None], at] = stored[own[at][:, None], own[at]]
        buffer.tensor.copy_(pack_upper(matrix)[start : start + len(buffer.tensor)])


def check_rows(rows: TokenRows, layers: Iterable[Layer], alignment: Alignment) -> None:
    """Refuse to solve by inputs alone for rows that some models have and others see differently."""
    models = [number for number, name in enumerate(rows.names) if name != "base"]
    own, given = rows.own[models], rows.given[models]
    num_having, num_giving = (own >= 0).sum(0), (rows.given >= 0).sum(0)
    is_only_one = (num_having == 1) & (num_giving == 1) & ((own == given) & (own >= 0)).any(0)
    is_mixed = (num_having > 0) & (num_having < len(models)) & ~is_only_one
    num_mixed = int(is_mixed.sum())
    by_token = set(_by_token(rows, alignment.models[0])) if num_mixed else set()
    StatisticsError.raise_all(
        f"'{layer.name}': {num_mixed:,} of its rows are in some of the models only, and "
        f"{one.stage.objective.name} counts every model for all rows alike; merge it otherwise "
        "with an override (method: average, or the objective kfac), or say with tokenizer: tokens: "
        "which row is for all (force: true)"
        for layer in layers
        if layer.name in by_token
        for one in layer.rounds
        if _counts_all_rows(one)
    )


def _counts_all_rows(one: Round) -> bool:
    objective = one.stage.objective
    is_by_inputs = objective.uses_inputs and not objective.has_output_factors
    return is_by_inputs and one.found.view.seen != "embedding"
