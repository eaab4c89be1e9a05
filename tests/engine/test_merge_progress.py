"""How far a merge is: layers where systems are solved, bytes elsewhere."""

from solved_models import make_nets, make_statistics

import matsmerge
from matsmerge.progress import BYTES, Update


def test_layers_are_counted_and_named() -> None:
    base, models = make_nets()
    told: list[Update] = []
    planned = matsmerge.plan(list(models), base, "mats_kfac", statistics=make_statistics())
    merged = planned.merge(executor=matsmerge.SerialExecutor(), progress=told.append)
    merging = [update for update in told if update.title == "merging"]
    modules = {name.rpartition(".")[0] for name in merged.layers}
    assert {update.unit for update in merging} == {"layers"}
    assert merging[-1].done == merging[-1].total
    named = [update.text for update in merging if update.text in modules]
    assert set(named) <= modules
    assert len(set(named)) > 1
    # A layer is named before it is done.
    first = next(update for update in merging if update.text)
    assert first.done == 0


def test_bytes_are_counted_elsewhere() -> None:
    base, models = make_nets()
    told: list[Update] = []
    matsmerge.merge(list(models), base, "average", progress=told.append)
    assert {update.unit for update in told if update.title == "merging"} == {BYTES}
    assert told[-1].done == told[-1].total
