"""From models to advice: open, run on data, read weights, judge, propose and try the proposal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from matsmerge.advice import verdicts
from matsmerge.advice.advice import Advice, Finding, LayerFigures, ModelFigures
from matsmerge.advice.answers import Answers, answer, ask
from matsmerge.advice.expectations import expect
from matsmerge.advice.fisher_sizes import fisher_sizes
from matsmerge.advice.opened_models import AdviceSubject, OpenedModels, open_models
from matsmerge.advice.own_layers import find_fresh, in_modules, make_patterns
from matsmerge.advice.proposal import Candidate, Situation, candidates, propose_weights
from matsmerge.advice.task_vectors import TaskVectors, measure_task_vectors
from matsmerge.engine.prepared_merge import PreparedMerge, prepare_merge
from matsmerge.errors import DataError, MatsError
from matsmerge.models.kept_base import KeptBase
from matsmerge.problems import noted
from matsmerge.progress import Progress
from matsmerge.recipes.recipe import make_recipe


def give_advice(subject: AdviceSubject, num_examples: int, progress: Progress) -> Advice:
    """Advice on a merge; of each model's data so many examples are looked at."""
    opened = open_models(subject)
    answers, notes = _ask_all(opened, num_examples, progress)
    everything = measure_task_vectors(opened.alignment, progress)
    fresh = find_fresh(everything)
    vectors = everything.without(in_modules(everything.products, fresh))
    sizes = fisher_sizes(opened.statistics) if opened.kinds else {}
    poor = tuple(name for name, own in answers.items() if verdicts.is_poor(own))
    left_out = {*poor, *verdicts.unmoved(vectors)}
    situation = Situation(
        models=vectors.models,
        view=opened.inputs.view,
        change=median(vectors.typical_changes),
        is_language_model=opened.is_language_model,
        has_data=len(opened.rows) == len(vectors.models),
        kinds=opened.kinds,
        poor=poor,
        large=verdicts.large_norms(vectors, left_out),
        fisher=sizes,
    )
    own = [*opened.unshared, *in_modules(everything.products, fresh)]
    chosen = _choose(opened, situation, make_patterns(own, opened.names))
    findings = (
        *opened.findings,
        *_judge_fresh(fresh, everything),
        *verdicts.judge_origin(vectors),
        *verdicts.judge_norms(vectors, situation.large, left_out),
        *verdicts.judge_directions(vectors),
        *verdicts.judge_fisher(sizes),
        *verdicts.judge_answers(answers),
        *chosen.refused,
        *expect(chosen.candidate.name, situation.change),
    )
    return Advice(
        _summarize(chosen, findings, vectors),
        findings,
        chosen.prepared.recipe,
        _describe_models(vectors, chosen.weights, sizes, answers),
        tuple(_describe_layers(vectors)),
        tuple(map(tuple, vectors.whole.cosines.tolist())),
        (*notes, *chosen.prepared.notes),
        chosen.arguments,
    )


def _ask_all(
    opened: OpenedModels, num_examples: int, progress: Progress
) -> tuple[dict[str, Answers], list[str]]:
    """Run each model on its own data, one after the other; after a problem none is run."""
    sizes = {name: min(num_examples, len(rows)) for name, (_, rows) in opened.rows.items()}
    if sizes:
        progress.stage("running models", sum(sizes.values()), "examples")
    answers: dict[str, Answers] = {}
    notes: list[str] = []
    problems: list[str] = []
    kept = KeptBase()
    for name, (described, rows) in opened.rows.items():
        with noted(problems):
            asked = ask(str(opened.subject.models[name]), described, rows, sizes[name], kept)
            notes += [f"{name}: {note}" for note in asked.notes]
            if not problems:
                answers[name] = answer(asked, progress)
            del asked  # so that no two models are in memory
    DataError.raise_all(problems)
    return answers, notes


@dataclass(frozen=True)
class _Choice:
    """The best method that could be planned."""

    candidate: Candidate
    weights: Mapping[str, float]
    prepared: PreparedMerge
    arguments: Mapping[str, Any]
    refused: tuple[Finding, ...] = ()  # better ones, and why not


def _choose(opened: OpenedModels, situation: Situation, heads: list[str]) -> _Choice:
    """Plan one method after the other, until one is not refused."""
    refused: list[Finding] = []
    *better, last = candidates(situation)
    for candidate in better:
        try:
            return replace(_plan(opened, situation, candidate, heads), refused=tuple(refused))
        except MatsError as error:
            text = f"{candidate.name} would be better, but cannot be used: {error.problems[0]}"
            refused.append(Finding("method", "note", text))
    return replace(_plan(opened, situation, last, heads), refused=tuple(refused))


def _plan(
    opened: OpenedModels, situation: Situation, candidate: Candidate, heads: list[str]
) -> _Choice:
    """Plan a merge by one method, as `mats merge --dry-run` does."""
    subject, weights = opened.subject, propose_weights(situation, candidate)
    data = subject.data or {} if candidate.data else {}
    places = opened.places if candidate.statistics else {}
    options: dict[str, Any] = {"method": candidate.method, "heads": heads}
    if candidate.output is not None:
        options["output"] = candidate.output
    entries = subject.entries()
    for name, entry in entries.items():
        entry["weight"] = weights[name]
        if name in data:
            entry["data"] = data[name]
        if isinstance(place := places.get(name), (str, Path)):
            entry["statistics"] = str(place)
    recipe = make_recipe(subject.recipe(models=list(entries.values()), **options))
    prepared = prepare_merge(recipe, subject.sources, places)
    arguments = options | {"weights": list(weights.values())}
    if subject.ignore_tokenizers:
        arguments["ignore_tokenizers"] = True
    arguments |= {key: dict(v) for key, v in (("data", data), ("statistics", places)) if v}
    return _Choice(candidate, weights, prepared, arguments)


def _judge_fresh(fresh: Mapping[str, float], vectors: TaskVectors) -> Iterator[Finding]:
    usual = median(vectors.typical_changes)
    for module, change in fresh.items():
        yield Finding(
            "heads",
            "warning",
            f"{module} was learnt from scratch: it moved by up to {change:.0%} of its norm, a "
            f"typical matrix by {usual:.1%}. The models have no common start there, and merging it "
            "can destroy all the rest: it is kept with each task's head.",
        )


def _summarize(chosen: _Choice, findings: tuple[Finding, ...], vectors: TaskVectors) -> str:
    num = sum(found.level == "warning" for found in findings)
    fits = "do not all fit this base" if verdicts.strangers(vectors) else "fit together"
    fit = f"The {len(vectors.models)} models {fits}"
    caution = "" if not num else f", with {num} warning{'s' if num > 1 else ''}"
    return f"{fit}{caution}. Merge them by {chosen.candidate.name}: {chosen.candidate.why}."


def _describe_models(
    vectors: TaskVectors,
    weights: Mapping[str, float],
    sizes: Mapping[str, float],
    answers: Mapping[str, Answers],
) -> dict[str, ModelFigures]:
    whole = vectors.whole
    return {
        name: ModelFigures(change, norm, weights[name], sizes.get(name), answers.get(name))
        for name, change, norm in zip(vectors.models, whole.changes, whole.norms, strict=True)
    }


def _describe_layers(vectors: TaskVectors) -> Iterator[LayerFigures]:
    num = len(vectors.models)
    for name, geometry in vectors.layers.items():
        cosines = geometry.cosines
        pairs = [float(cosines[i, j]) for i in range(num) for j in range(i)]
        yield LayerFigures(name, tuple(geometry.changes), mean(pairs))
