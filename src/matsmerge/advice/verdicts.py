"""From what was measured to what it means, in words.

The thresholds were set by models of our suites, fine-tuned from all-MiniLM-L6-v2 and from a small
vision transformer; docs/advise.md has what was measured there.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from matsmerge.advice.advice import Finding
from matsmerge.advice.answers import Answers
from matsmerge.advice.own_layers import UNRELATED_COSINE
from matsmerge.advice.task_vectors import TaskVectors
from matsmerge.statistics.marks import is_clearly_better

# Of what is possible. Models fine-tuned on 100 tweets, which answer "positive" to most others, had
# 0.03 and 0.07; of those that learnt their task the lowest, right in 42 % of 30 classes, had 0.37.
POOR_VARIETY = 0.1
# Task vectors are added up: one that is three times as long decides the direction of the sum.
LARGE_NORM = 3.0
# A model whose changes are these shares of the others' and of the base's norm adds nothing.
UNMOVED_BESIDE_OTHERS, UNMOVED_CHANGE = 0.01, 1e-4
# Fisher information differs between models by small factors in any case.
OTHER_CONFIDENCE = 10.0
# Independent task vectors have a cosine of about 0, two trainings on the same data 0.1. Near 1 are
# copies, or two states of one training; well below 0 they undo each other's changes.
SAME_COSINE, OPPOSITE_COSINE = 0.95, -0.1
# How far a typical matrix moved, relative to its norm: about 2 % in text-small, where averaging
# keeps 89 % of the separate models' accuracy, 10 % in vision-small, where it keeps 54 %.
FAR_CHANGE = 0.05


def is_poor(answers: Answers) -> bool:
    """Does a model answer about the same whatever it is asked?

    Labels say what is possible: of data that is nearly all of one class, no model can tell more.
    Tokens of text are not judged.
    """
    if answers.writes_text:
        return False
    if answers.variety < POOR_VARIETY * (answers.label_variety or 1.0):
        return True
    if answers.accuracy is None or answers.majority is None:
        return False
    return not is_clearly_better(answers.accuracy, answers.majority, answers.num_examples)


def unmoved(vectors: TaskVectors) -> tuple[str, ...]:
    """Models that are the base, or so near to it that beside the others they do nothing."""
    norms = vectors.whole.norms
    found = []
    for i, (name, change) in enumerate(zip(vectors.models, vectors.whole.changes, strict=True)):
        others = norms[:i] + norms[i + 1 :]
        is_short = bool(others) and norms[i] < UNMOVED_BESIDE_OTHERS * median(others)
        if norms[i] == 0 or (is_short and change < UNMOVED_CHANGE):
            found.append(name)
    return tuple(found)


def strangers(vectors: TaskVectors) -> tuple[str, ...]:
    """Models whose weights have nothing to do with the base's."""
    cosines = vectors.of_matrices.cosines_with_base
    return tuple(
        name
        for name, cosine in zip(vectors.models, cosines, strict=True)
        if cosine < UNRELATED_COSINE
    )


def large_norms(vectors: TaskVectors, left_out: Collection[str] = ()) -> dict[str, float]:
    """Models whose task vectors are much longer than is usual here, by how many times.

    How far a poor model moved, or one that hardly did, is no measure for the others.
    """
    norms = _norms(vectors, left_out)
    found = {}
    for name, norm in norms.items():
        others = [other for of, other in norms.items() if of != name]
        if others and norm > LARGE_NORM * median(others) > 0:
            found[name] = norm / median(others)
    return found


def judge_origin(vectors: TaskVectors) -> Iterator[Finding]:
    """Were the models fine-tuned from this base?"""
    typical = vectors.typical_changes
    same = unmoved(vectors)
    strange = [name for name in strangers(vectors) if name not in same]
    others = {*vectors.models} - {*same, *strange}
    changes = dict(zip(vectors.models, typical, strict=True))
    far = {name: c for name, c in changes.items() if name in others and c > FAR_CHANGE}
    if strange:
        yield Finding(
            "base",
            "warning",
            f"{_named(strange)} hardly resemble{_s(strange)} the base: most weights have nothing "
            "to do with it. Either it is not the base of the fine-tuning, or training was from "
            "scratch; merged weights will not work. Check --base first.",
            tuple(strange),
        )
    if same:
        yield Finding(
            "base",
            "warning",
            f"{_named([*same])} {_is(same)} the base itself, or next to it, but for the head; "
            f"leave {'it out: it adds' if len(same) == 1 else 'them out: they add'} nothing and "
            f"dilute{_s(same)} the others.",
            same,
        )
    if far:
        said = _span(min(far.values()), max(far.values()))
        yield Finding(
            "distance",
            "warning",
            f"{_named([*far])} moved far from the base: a typical matrix by {said} of its norm. "
            "Averages lose much of what such models know; a method that runs them on their data "
            "(mats_cross) keeps most of it.",
            tuple(far),
        )
    if not (strange or same or far):
        low, high = min(typical), max(typical)
        yield Finding(
            "base",
            "good",
            f"All models are close to the base: a typical matrix moved by {_span(low, high)} of "
            "its norm.",
        )


def judge_norms(
    vectors: TaskVectors, large: Mapping[str, float], left_out: Collection[str] = ()
) -> Iterator[Finding]:
    """Would one model, of those with long task vectors, drown the others?"""
    if large:
        said = ", ".join(f"{name} {ratio:.1f} times" for name, ratio in large.items())
        yield Finding(
            "norms",
            "warning",
            f"Some models moved much farther than the others: {said} as far. Where task vectors "
            "are added up they would drown the others; the weights below make up for it where the "
            "method does not.",
            tuple(large),
        )
        return
    norms = [norm for norm in _norms(vectors, left_out).values() if norm]
    if len(norms) > 1:
        yield Finding(
            "norms",
            "good",
            "No model would drown the others: the longest task vector is "
            f"{max(norms) / min(norms):.1f} times as long as the shortest.",
        )


def judge_directions(vectors: TaskVectors) -> Iterator[Finding]:
    """Do the models change the base in the same, in other or in opposite ways?"""
    cosines, names = vectors.whole.cosines, vectors.models
    pairs = {
        (names[i], names[j]): float(cosines[i, j])
        for i in range(len(names))
        for j in range(i + 1, len(names))
    }
    same = [pair for pair, cosine in pairs.items() if cosine > SAME_COSINE]
    opposite = [pair for pair, cosine in pairs.items() if cosine < OPPOSITE_COSINE]
    for a, b in same:
        yield Finding(
            "directions",
            "warning",
            f"{a} and {b} are nearly the same model (cosine of their task vectors "
            f"{pairs[a, b]:.2f}): together they count twice. Leave one out, or halve both weights.",
            (a, b),
        )
    for a, b in opposite:
        yield Finding(
            "directions",
            "warning",
            f"{a} and {b} undo each other's changes (cosine {pairs[a, b]:.2f}): a merge can hardly "
            "serve both.",
            (a, b),
        )
    if pairs and not same and not opposite:
        low, high = min(pairs.values()), max(pairs.values())
        yield Finding(
            "directions",
            "good",
            f"Task vectors do not contradict each other (cosines {low:.2f} to {high:.2f}; 0 is "
            "what independent changes have).",
        )


def judge_fisher(sizes: Mapping[str, float]) -> Iterator[Finding]:
    """Are some models much surer of their answers than others, by their statistics?"""
    positive = {name: size for name, size in sizes.items() if size > 0}
    if len(positive) < 2:
        return
    surest, least = min(positive, key=positive.__getitem__), max(positive, key=positive.__getitem__)
    ratio = positive[least] / positive[surest]
    if ratio > OTHER_CONFIDENCE:
        yield Finding(
            "confidence",
            "note",
            f"{surest} is much surer of its answers than {least}, by their statistics: it has "
            f"{ratio:.0f} times less Fisher information. Sums of it would listen to {least} alone; "
            "mats_kfac and mats_cross bring all models to the same size (equalize).",
            (surest, least),
        )
    else:
        yield Finding(
            "confidence",
            "good",
            f"By their statistics the models are about equally sure of their answers (Fisher "
            f"information differs by a factor of {ratio:.1f} at most).",
        )


def judge_answers(answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Does each model know its task?"""
    poor = [name for name, own in answers.items() if is_poor(own)]
    for name in poor:
        own = answers[name]
        labels = "" if own.accuracy is None else (
            f" It is right on {own.accuracy:.0%} of them; always giving the most frequent label "
            f"would be right on {own.majority:.0%}."
        )  # fmt: skip
        yield Finding(
            "answers",
            "warning",
            f"{name} is a poor model: on {own.num_examples} of its own examples it gives the same "
            f"answer to {own.commonest_share:.0%}, and its answers say hardly anything about the "
            f"example ({own.variety:.0%} of what {own.num_classes} classes allow).{labels} What "
            "matches it closely repeats its mistakes: it gets little weight. (If its data really "
            "has hardly any other answer, ignore this.)",
            (name,),
        )
    confidences = [own.confidence for own in answers.values() if not own.writes_text]
    if confidences and not poor:
        every = "Every model" if len(confidences) == len(answers) else "Every classifier"
        yield Finding(
            "answers",
            "good",
            f"{every} tells its own examples apart (mean probability of the likeliest answer "
            f"{_span(min(confidences), max(confidences))}).",
        )


def _norms(vectors: TaskVectors, left_out: Collection[str]) -> dict[str, float]:
    norms = dict(zip(vectors.models, vectors.whole.norms, strict=True))
    return {name: norm for name, norm in norms.items() if name not in left_out}


def _named(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _s(names: Sequence[str]) -> str:
    return "s" if len(names) == 1 else ""


def _span(low: float, high: float) -> str:
    a, b = f"{low:.1%}", f"{high:.1%}"
    return a if a == b else f"{a} to {b}"
