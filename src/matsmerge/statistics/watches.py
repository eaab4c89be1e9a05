"""A model at work on batches: in one go where that is exact, and else an example at a time.

How a model uses its modules is learnt from a few examples, and tried out on two: together in a
batch, and each alone with plain gradients. Where that does not give the same (examples that
influence each other, rows in an unusual order, weights used behind their module's back), every
example is run alone; slower, but right for any model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError, RecipeError
from matsmerge.statistics.gradient_watch import GradientWatch
from matsmerge.statistics.input_watch import InputWatch, Pass, Subject
from matsmerge.statistics.loss_terms import loss_terms
from matsmerge.statistics.row_masks import RowMasks
from matsmerge.statistics.shown_batch import ShownBatch
from matsmerge.statistics.structure import find_structure, widening
from matsmerge.statistics.totals import Totals


class Watches:
    """Adds batches that are padded alike to totals; to be tried out first."""

    def __init__(self, subject: Subject, shown: ShownBatch, hooks: ExitStack) -> None:
        self._subject = subject

        def run(num_examples: int) -> tuple[Any, int]:
            few = shown.few(num_examples)
            return subject.run(subject.model, few.item), few.examples.num_sequences

        self.structure = find_structure(subject.model, subject.maps, run)
        self._inputs = InputWatch(subject, self.structure)
        self._together = GradientWatch(subject, self.structure)
        self._alone = GradientWatch(subject, self.structure, is_alone=True)
        self._refuse_elsewhere()
        wide = [m for m in subject.maps if m.name in self.structure.widened]
        hooks.enter_context(widening(wide, self._num_sequences))
        for watch in (self._together, self._alone, self._inputs):
            hooks.enter_context(watch.hooks())
        self._refuse_unseen(hooks)
        self.notes: list[str] = []
        self.is_one_by_one = False
        self.is_tried_out = False

    @property
    def handled(self) -> set[str]:
        """The parameters whose gradients are known for single examples."""
        return set(self._subject.parameters) if self.is_one_by_one else self._together.handled

    def add(self, shown: ShownBatch, totals: Totals) -> None:
        """Run the model on a batch and add what it does."""
        if not self.is_one_by_one:
            self._add_together(shown, totals)
            return
        for n in range(len(shown.examples.numbers)):
            self._add_alone(shown.take([n]), totals)

    def _refuse_elsewhere(self) -> None:
        if self._together.elsewhere:
            raise RecipeError(
                [
                    f"parameter '{name}': is kept on disk or in memory until it is used, so its "
                    "Fisher information cannot be taken; put the model on one device, leave it "
                    "out with --parameters, or collect gram or kfac"
                    for name in self._together.elsewhere[:10]
                ]
            )

    def _refuse_unseen(self, hooks: ExitStack) -> None:
        """Have a module that none of the few examples used stop the run when it is used after all.

        What it does would not be counted, and nobody would know.
        """
        owners = {m for owned in self._subject.parameters.values() for m, _ in owned.owners}
        for name in owners - set(self.structure.uses):

            def refuse(_: nn.Module, _args: Any, name: str = name) -> None:
                if self._together.current or self._alone.current or self._inputs.current:
                    raise DataError(
                        f"module '{name}': is used by these examples but not by the first ones, "
                        "from which the model's structure was learnt; let data that uses it come "
                        "first (--shuffle), or leave it out with --parameters"
                    )

            module = self._subject.model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(refuse).remove)

    def try_out(self, shown: ShownBatch) -> None:
        """See whether two examples give the same together and alone; if not, go one by one.

        A batch of one example, shown twice, is no proof; a later batch is then tried as well.
        """
        self.is_tried_out = len(shown.examples.numbers) > 1
        if self.is_one_by_one or not all(p.is_here for p in self._subject.parameters.values()):
            return
        two, dtype = shown.few(2), self._subject.sets[0].dtype
        together, alone = Totals(dtype, is_sketch=True), Totals(dtype, is_sketch=True)
        problem = None
        try:
            self._add_together(two, together)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            problem = first_line(error)  # the user's own, if it comes up again alone
        for n in range(2):
            self._add_alone(two.take([n]), alone)
        if problem is None:
            differing = together.differences(alone, _precision(self._subject.model))
        else:
            differing = [f"shapes ({problem})"]
        if differing:
            self.is_one_by_one = True
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            self.notes.append(
                "examples are run one at a time, which is slower: in a batch this model gives "
                f"other {differing[0]}{more}"
            )

    def _add_together(self, shown: ShownBatch, totals: Totals) -> None:
        subject = self._subject
        with self._watching(shown, totals, self._together):
            if not subject.options.wants_gradients:
                with torch.no_grad():
                    subject.run(subject.model, shown.item)
                self._inputs.end_forward()
                return
            with torch.enable_grad():
                result = subject.run(subject.model, shown.item)
                self._inputs.end_forward()
                terms = loss_terms(result, shown.examples.numbers, subject.options)
                self._together.backward(terms)

    def _add_alone(self, shown: ShownBatch, totals: Totals) -> None:
        """One example, with gradients as autograd gives them."""
        subject = self._subject
        if not subject.options.wants_gradients:
            self._add_together(shown, totals)
            return
        parameters = list(subject.parameters.values())
        for owned in parameters:
            owned.parameter.requires_grad_(True)
        try:
            with self._watching(shown, totals, self._alone), torch.enable_grad():
                result = subject.run(subject.model, shown.item)
                self._inputs.end_forward()
                terms = loss_terms(result, shown.examples.numbers, subject.options)
                self._alone.backward(terms)
        finally:
            for owned in parameters:
                owned.parameter.requires_grad_(False)

    @contextmanager
    def _watching(
        self, shown: ShownBatch, totals: Totals, gradients: GradientWatch
    ) -> Iterator[None]:
        masks = RowMasks(shown.masks, shown.examples.num_sequences)
        current = Pass(totals, shown.examples, masks)
        self._inputs.current = current
        if self._subject.options.wants_gradients:
            gradients.current = current
            gradients.begin_forward()
        try:
            yield
        finally:
            self._inputs.current = gradients.current = None
            self._subject.shared.forget()

    def _num_sequences(self) -> int:
        """Of the batch that is watched; 1 if none is."""
        current = self._inputs.current
        return 1 if current is None else current.examples.num_sequences


def _precision(model: nn.Module) -> float:
    """The rounding of the model's coarsest parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo().eps)
