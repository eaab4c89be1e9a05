"""What a plan decides without being asked, in words."""

from collections.abc import Iterator, Sequence

from matsmerge.checkpoints.alignment import Alignment
from matsmerge.engine.devices import find_devices, has_float64
from matsmerge.engine.plan import Plan
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.problems import counted, listed
from matsmerge.recipes.recipe import Recipe
from matsmerge.statistics.statistics import MAIN


def plan_notes(
    plan: Plan, recipe: Recipe, alignment: Alignment, evidence: Sequence[Evidence]
) -> Iterator[str]:
    """Parameters that are merged otherwise, or elsewhere, than was asked."""
    yield from _otherwise_notes(plan)
    yield from _unused_notes(plan, alignment, evidence)
    yield from _device_notes(plan, recipe.device)


def _otherwise_notes(plan: Plan) -> Iterator[str]:
    if not plan.otherwise:
        return
    names = [p.name for p in plan.otherwise]
    used = dict.fromkeys(p.rule.method.fallback.name for p in plan.otherwise)
    yield (
        f"merged by {' or '.join(used)}, since the objective has nothing for them ({len(names)} of "
        f"{len(plan.parameters)} tensors; all are in merge.json): {listed(names, 6)}"
    )


def _unused_notes(plan: Plan, alignment: Alignment, evidence: Sequence[Evidence]) -> Iterator[str]:
    """The experts that some model did not use, so that the objective has nothing for them."""
    for model, one in zip(alignment.models, evidence, strict=False):
        unused = [p for p in plan.otherwise if one.is_unused(p.name)]
        experts = dict.fromkeys(p.name.rsplit(".", 2)[0] for p in unused)
        used = dict.fromkeys(p.rule.method.fallback.name for p in unused)
        if experts:
            yield (
                f"merged by {' or '.join(used)}, since no token of {model.name}'s data was routed "
                f"to them ({counted(list(experts), 'expert')}): {listed(list(experts), 12)}"
            )


def _device_notes(plan: Plan, device: str | None) -> Iterator[str]:
    """What is not merged on the device that was asked for."""
    if device is None or has_float64(device if device != "auto" else find_devices(device)[0]):
        return
    sites = (site for job in plan.jobs for site in job.sites if site.needs_float64)
    names = list(dict.fromkeys(p.name for site in sites for p in site.parameters))
    if names:
        yield (
            f"merged on the processor, since they need float64, which {device} does not have "
            f"({len(names)} of {len(plan.parameters)} tensors): {listed(names, 6)}"
        )


def poor_models(recipe: Recipe, evidence: Sequence[Evidence]) -> Iterator[str]:
    """Which models did not learn their tasks, as far as labels beside statistics show it."""
    for entry, one in zip(recipe.models, evidence, strict=False):  # there may be no statistics
        marks = one.statistics.header.sets[MAIN].marks
        if marks is not None and marks.is_poor:
            yield (
                f"{entry.name} is a poor model: of the {marks.num} examples its statistics are of "
                f"it gets {marks.accuracy:.0%} right, and always giving the most frequent label "
                f"{marks.majority:.0%}. A merge that matches it closely repeats its mistakes; "
                "`mats advise` says how much weight to give it, or which other method to use"
            )
