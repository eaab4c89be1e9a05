"""Runs a model on batches and adds up what it does: batches at once where that is exact.

How a model uses its modules is learnt from a few examples. Two examples then show whether that is
right: they are run together in a batch, and each alone with plain gradients. Where the two differ
(examples that influence each other, rows in an unusual order, weights that are used without calling
their module), every example is run alone; slower, but right for any model.
"""

from contextlib import ExitStack
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError, RecipeError
from matsmerge.statistics.gradient_watch import GradientWatch
from matsmerge.statistics.input_watch import InputWatch, WatchedBatch, WatchedModel
from matsmerge.statistics.loss_terms import Terms, loss_terms
from matsmerge.statistics.marks import marks_of
from matsmerge.statistics.replay import requiring_gradients
from matsmerge.statistics.row_masks import RowMasks
from matsmerge.statistics.shown_batch import ShownBatch
from matsmerge.statistics.statistics import MAIN, WholeNumber
from matsmerge.statistics.structure import find_structure, widen
from matsmerge.statistics.totals import State, Totals


class Lesson(State, frozen=False):
    """How the model treats batches that are padded alike, as learnt from the first of them."""

    batch: Annotated[WholeNumber, Field(ge=1)]  # the first such batch, counted from 1
    is_padded: list[bool]
    is_one_by_one: bool  # it gives other values in a batch than for single examples
    is_tried_out: bool  # that was seen on two different examples


class Watches:
    """Adds batches that are padded alike to totals; to be tried out first.

    The first of these batches shows how the model uses its modules.
    """

    def __init__(
        self, subject: WatchedModel, shown: ShownBatch, lesson: Lesson, hooks: ExitStack
    ) -> None:
        self._subject = subject
        self.lesson = lesson

        def run(num_examples: int) -> tuple[Any, int]:
            few = shown.few(num_examples)
            return subject.run(subject.model, few.item), few.sequences.num_sequences

        self.structure = find_structure(subject.model, subject.maps, run)
        self._inputs = InputWatch(subject, self.structure)
        self._gradients = GradientWatch(subject, self.structure)
        RecipeError.raise_all(
            f"parameter '{name}': is kept on disk or in memory until it is used, so its Fisher "
            "information cannot be taken; put the model on one device, leave it out with "
            "--parameters, or collect gram or kfac"
            for name in self._gradients.elsewhere[:10]
        )
        wide = [m for m in subject.maps if m.name in self.structure.widened]
        widen(wide, self._num_sequences, hooks)
        self._gradients.watch(hooks)
        self._inputs.watch(hooks)
        self._refuse_unseen(hooks)

    @property
    def handled(self) -> set[str]:
        """The parameters whose gradients are known for single examples."""
        if self.lesson.is_one_by_one:
            return set(self._subject.parameters)
        return self._gradients.handled

    def add(self, shown: ShownBatch, totals: Totals) -> None:
        """Run the model on a batch and add what it does."""
        if not self.lesson.is_one_by_one:
            self._add(shown, totals)
            return
        for n in range(len(shown.examples)):
            self._add(shown.take([n]), totals, is_alone=True)

    def _refuse_unseen(self, hooks: ExitStack) -> None:
        """Have a module that none of the few examples used stop the run when it is used after all.

        What it does would not be counted, and nobody would know.
        """
        owners = {m for owned in self._subject.parameters.values() for m in owned.modules}
        for name in owners - set(self.structure.uses):

            def refuse(_: nn.Module, _args: Any, name: str = name) -> None:
                if self._gradients.is_watching or self._inputs.is_watching:
                    raise DataError(
                        f"module '{name}': is used by these examples but not by the first ones, "
                        "from which the model's structure was learnt; let data that uses it come "
                        "first (--shuffle), or leave it out with --parameters"
                    )

            module = self._subject.model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(refuse).remove)

    def try_out(self, shown: ShownBatch) -> list[str]:
        """See whether two examples give the same together and alone; if not, go one by one.

        A batch of one example, shown twice, is no proof; a later batch is then tried as well.
        Returns what the user should know.
        """
        lesson = self.lesson
        lesson.is_tried_out = len(shown.examples) > 1
        if lesson.is_one_by_one or not all(p.is_here for p in self._subject.parameters.values()):
            return []
        two, dtype = shown.few(2), self._subject.totals[MAIN].dtype
        together, alone = Totals(dtype, is_trial=True), Totals(dtype, is_trial=True)
        problem = None
        try:
            self._add(two, together)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            problem = first_line(error)  # the user's own, if it comes up again alone
        for n in range(2):
            self._add(two.take([n]), alone, is_alone=True)
        if problem is None:
            differing = together.differences(alone, _precision(self._subject.model))
        else:
            differing = [f"shapes ({problem})"]
        if not differing:
            return []
        lesson.is_one_by_one = True
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return [
            "examples are run one at a time, which is slower: in a batch this model gives other "
            f"{differing[0]}{more}"
        ]

    def _add(self, shown: ShownBatch, totals: Totals, *, is_alone: bool = False) -> None:
        """Run a batch in one go, or an example that `is_alone` with gradients from autograd."""
        subject = self._subject
        wants_gradients = subject.options.wants_gradients
        masks = RowMasks(shown.row_masks, shown.sequences.num_sequences)
        current = WatchedBatch(totals, shown.sequences, masks, is_alone)
        differentiated = subject.parameters.values() if wants_gradients and is_alone else ()
        self._inputs.begin_forward(current)
        if wants_gradients:
            self._gradients.begin_forward(current)
        try:
            with (
                requiring_gradients([owned.parameter for owned in differentiated]),
                torch.set_grad_enabled(wants_gradients),
            ):
                result = subject.run(subject.model, shown.item)
                self._inputs.end_forward()
                totals.marks += result.marks if isinstance(result, Terms) else marks_of(result)
                if wants_gradients:
                    terms = loss_terms(result, shown.examples, subject.options)
                    self._gradients.backward(terms)
        finally:
            self._inputs.is_watching = self._gradients.is_watching = False
            subject.shared.forget()

    def _num_sequences(self) -> int:
        """Of the batch that is watched; 1 if none is."""
        return self._inputs.current.sequences.num_sequences if self._inputs.is_watching else 1


def _precision(model: nn.Module) -> float:
    """The rounding of the model's coarsest parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo().eps)
