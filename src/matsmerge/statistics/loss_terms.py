"""What is sent back through a model: one scalar for each example."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from matsmerge.errors import DataError, NonFiniteError
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.marks import Marks
from matsmerge.tasks.kinds import continues_input
from matsmerge.tasks.prediction import IGNORED, Prediction


@dataclass(frozen=True)
class Terms:
    """Scalars of examples, (examples,) each, in place of a loss that they come from."""

    values: Iterable[Tensor]
    marks: Marks = field(default_factory=Marks)  # of the answers whose loss it is


def loss_terms(result: Any, numbers: Sequence[int], options: CollectionOptions) -> Iterator[Tensor]:
    """Scalars of examples from what a loss function returned, checked; see `fisher_terms`."""
    if isinstance(result, tuple) and len(result) == 2:
        result = Prediction(*result)
    if isinstance(result, Prediction):
        _check_targets(result, numbers)
        terms = result.fisher_terms(
            options.fisher, options.reduction, numbers, options.seed, options.num_samples
        )
    elif isinstance(result, Terms):
        terms = iter(result.values)
    else:
        terms = iter([_losses(result, numbers, options)])
    for term in terms:
        NonFiniteError.raise_all(
            f"example {numbers[n]}: its loss is {float(term[n].detach())}; look at the example, or "
            "use a wider dtype"
            for n in (~term.detach().isfinite()).nonzero()[:, 0].tolist()
        )
        yield term


def _losses(result: Any, numbers: Sequence[int], options: CollectionOptions) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != (len(numbers),):
        found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise DataError(
            f"the loss function returned {found}, expected the loss of each example, a tensor of "
            f"shape [{len(numbers)}] (reduction='none'), or a tuple of logits and targets"
        )
    if options.fisher == "true":
        raise DataError(
            "the true Fisher needs the model's distribution; let the loss function return a tuple "
            "of logits and targets"
        )
    return result


def _check_targets(prediction: Prediction, numbers: Sequence[int]) -> None:
    targets, num_classes = prediction.targets, prediction.logits.shape[-1]
    if targets is None:
        return
    if len(targets) != len(numbers) or len(prediction.logits) != len(numbers):
        raise DataError(
            f"the loss function returned logits {list(prediction.logits.shape)} and targets "
            f"{list(targets.shape)} for a batch of {len(numbers)} examples"
        )
    wrong = (targets < 0) | (targets >= num_classes)
    if prediction.logits.ndim == 3:
        wrong = wrong & (targets != IGNORED)
        DataError.raise_all(
            f"example {numbers[n]}: has no target to predict; leave it out"
            for n in (targets == IGNORED).all(1).nonzero()[:, 0].tolist()
        )
    DataError.raise_all(
        f"example {numbers[where[0]]}: target {int(targets[tuple(where)])} is out of range, the "
        f"model has {num_classes} classes"
        for where in wrong.nonzero().tolist()[:10]
    )


def losses_by_labels(model: nn.Module, batch: Any) -> Prediction:
    """What a model of transformers says of a batch, and its labels, shifted where it would."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or labels.is_floating_point():
        found = "none" if labels is None else f"numbers of {labels.dtype}"
        raise DataError(
            f"expected 'labels' in the batches that are classes or tokens, found {found}; give "
            "loss=f with f(model, batch) returning the negative log-likelihood of each example"
        )
    logits = model(**batch).logits
    if continues_input(type(model).__name__):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return Prediction(logits, labels)
