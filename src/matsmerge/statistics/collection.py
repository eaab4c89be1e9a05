"""Statistics in the making: a model, and what has been seen of it so far."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.errors import DataError, NonFiniteError, RecipeError, ResourceError
from matsmerge.statistics.combining import statistics_of
from matsmerge.statistics.describing import Seen, describe_maps, find_lacking
from matsmerge.statistics.gradient_watch import GradientWatch
from matsmerge.statistics.input_watch import InputWatch, Pass
from matsmerge.statistics.options import Options
from matsmerge.statistics.parameters import find_maps, find_parameters, join_tied
from matsmerge.statistics.row_masks import RowMasks
from matsmerge.statistics.shared_inputs import SharedInputs
from matsmerge.statistics.shown_batch import ShownBatch, show
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Header, Origin, Statistics
from matsmerge.statistics.structure import Structure, find_structure, widening
from matsmerge.statistics.totals import Totals, totals_of
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED, Prediction
from matsmerge.version import __version__

Loss = Callable[[nn.Module, Any], Any]


class Collection:
    """Adds batches to totals, and makes statistics of them.

    `names` maps the model's parameters to those of its checkpoint; parameters that are not in it
    get no statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss: Loss | None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        if options.wants_gradients and loss is None:
            kinds = ", ".join(k for k in options.statistics if k != "gram")
            raise RecipeError(
                f"{kinds}: needs a loss; give loss=f with f(model, batch) returning the negative "
                "log-likelihood of each example, or logits and targets"
            )
        self.model = model
        self.options = options
        self._run = loss or _run_plain
        found = find_parameters(model, options.parameters)
        self._names = dict(names) if names is not None else {n: n for n in found}
        stored = {name: owned for name, owned in found.items() if name in self._names}
        self._parameters = join_tied(stored, self._names)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        dtype = torch.float32
        for found_dtype in dtypes:
            dtype = torch.promote_types(dtype, found_dtype)
        self.totals = {name: Totals(dtype) for name in self._set_names()}
        self._maps = find_maps(model, self._parameters)
        self._shared = SharedInputs()
        self._watches: dict[tuple[bool, ...], Watches] = {}  # by what of a batch is padded

    def _set_names(self) -> list[str]:
        return [MAIN, HELD_OUT] if self.options.held_out else [MAIN]

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model as it must be while batches are added; afterwards it is as it was."""
        modes = {module: module.training for module in self.model.modules()}
        # By name: a model that is spread over devices replaces its parameters as it runs.
        named = partial(self.model.named_parameters, remove_duplicate=False)
        required = {name: parameter.requires_grad for name, parameter in named()}
        fast_path = torch.backends.mha.get_fastpath_enabled()
        # Its fused kernels do not call the modules they stand for.
        torch.backends.mha.set_fastpath_enabled(False)
        self.model.eval()
        # Nothing is generated here, and what a cache holds would come up again in a replay.
        caching = [c for c in _configs(self.model) if getattr(c, "use_cache", False)]
        for config in caching:
            config.use_cache = False
        for _, parameter in named():
            parameter.requires_grad_(False)
        try:
            with ExitStack() as self._hooks:
                yield
        finally:
            self._watches.clear()
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for config in caching:
                config.use_cache = True
            for module, training in modes.items():
                module.training = training
            for name, parameter in named():
                parameter.requires_grad_(required[name])

    def look_at(self, item: Any) -> None:
        """Learn from a batch how the model uses its modules, and add nothing."""
        with _memory_errors():
            self._watches_for(show(item, self.model, 0))

    def add(self, item: Any, to: str = MAIN) -> int:
        """Run the model on a batch and add what it does; returns the number of examples."""
        totals = self.totals[to]
        shown = show(item, self.model, self.num_examples)
        masks = RowMasks(shown.masks, shown.examples.num_sequences)
        with _memory_errors():
            watches = self._watches_for(shown)
            with watches.on(Pass(totals, shown.examples, masks)):
                self._add(shown, watches)
        totals.num_examples += len(shown.examples.numbers)
        return len(shown.examples.numbers)

    def _add(self, shown: ShownBatch, watches: "Watches") -> None:
        if watches.gradients is None:
            with torch.no_grad():
                self._run(self.model, shown.item)
            watches.inputs.end_forward()
            return
        with torch.enable_grad():
            watches.gradients.begin_forward()
            result = self._run(self.model, shown.item)
            watches.inputs.end_forward()
            watches.gradients.backward(self._terms(result, shown))

    def _terms(self, result: Any, shown: ShownBatch) -> Iterator[Tensor]:
        """What to send back through the model, checked: one scalar for each example."""
        numbers = shown.examples.numbers
        if isinstance(result, tuple) and len(result) == 2:
            result = Prediction(*result)
        if isinstance(result, Prediction):
            _check_targets(result, numbers)
            options = self.options
            terms = result.fisher_terms(
                options.fisher, options.reduction, numbers, options.seed, options.num_samples
            )
        else:
            if not isinstance(result, Tensor) or result.shape != (len(numbers),):
                found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise DataError(
                    f"the loss function returned {found}, expected the loss of each example, a "
                    f"tensor of shape [{len(numbers)}] (reduction='none'), or a tuple of logits "
                    "and targets"
                )
            if self.options.fisher == "true":
                raise DataError(
                    "the true Fisher needs the model's distribution; let the loss function "
                    "return a tuple of logits and targets"
                )
            terms = iter([result])
        for term in terms:
            bad = (~term.detach().isfinite()).nonzero()[:, 0].tolist()
            if bad:
                raise NonFiniteError(
                    [
                        f"example {numbers[n]}: its loss is {float(term[n].detach())}; look at the "
                        "example, or use a wider dtype"
                        for n in bad
                    ]
                )
            yield term

    def _watches_for(self, shown: ShownBatch) -> "Watches":
        """What to watch in a batch; models take other ways with and without padding."""
        if shown.is_padded in self._watches:
            return self._watches[shown.is_padded]

        def run(num_examples: int) -> tuple[Any, int]:
            batch, num_sequences = shown.few(num_examples)
            return self._run(self.model, batch), num_sequences

        structure = find_structure(self.model, self._maps, run)
        counted = self._maps if self.options.wants_inputs else []
        sets = tuple(self.totals.values())
        inputs = InputWatch(counted, structure, self._shared, sets, keep_means=self.options.bias)
        gradients = None
        if self.options.wants_gradients:
            gradients = GradientWatch(
                self.model, self._parameters, self._maps, structure, self.options.statistics
            )
            if gradients.elsewhere:
                raise RecipeError(
                    [
                        f"parameter '{name}': is kept on disk or in memory until it is used, so "
                        "its Fisher information cannot be taken; put the model on one device, "
                        "leave it out with --parameters, or collect gram or kfac"
                        for name in gradients.elsewhere[:10]
                    ]
                )
        watches = Watches(structure, inputs, gradients)
        wide = [m for m in self._maps if m.name in structure.widened]
        self._hooks.enter_context(widening(wide, watches.num_sequences))
        if gradients is not None:
            self._hooks.enter_context(gradients.hooks())
        self._hooks.enter_context(inputs.hooks())
        self._watches[shown.is_padded] = watches
        return watches

    @property
    def num_examples(self) -> int:
        return sum(totals.num_examples for totals in self.totals.values())

    def restore(self, saved: Statistics) -> None:
        """Go on from what an unfinished collection had, under the model's own names."""
        dtype = self.totals[MAIN].dtype
        self.totals = {name: totals_of(saved, name, dtype) for name in self.totals}
        # What had gone apart stays apart.
        self._shared.include(
            {m.module: m.inputs for m in saved.header.maps if m.inputs is not None}
        )

    def expected_bytes(self) -> int:
        """About the size of the statistics in float32; known once a batch was looked at."""
        leaders = set(self._shared.leaders.values())
        inputs = [m for m in self._maps if m.name in leaders]
        num = sum(m.num_groups * m.num_inputs**2 // 2 for m in inputs if m.layout != "embedding")
        if "kfac" in self.options.statistics:
            num += sum(m.num_groups * m.num_outputs**2 // 2 for m in self._maps if m.has_factor)
        if "fisher" in self.options.statistics:
            num += sum(owned.parameter.numel() for owned in self._parameters.values())
        return 4 * len(self.totals) * num

    def statistics(
        self, model: Origin, data: tuple[Origin, ...], *, own_names: bool = False
    ) -> Statistics:
        """What has been collected so far, as means; with `own_names`, those of the module."""
        names = {n: n for n in self._parameters} if own_names else self._names
        main = self.totals[MAIN]
        seen = Seen(
            maps=self._maps,
            parameters=self._parameters,
            leaders=self._shared.leaders,
            used={m for w in self._watches.values() for m in w.structure.uses},
            handled={n for w in self._watches.values() if w.gradients for n in w.gradients.handled},
        )
        maps = describe_maps(seen, main, names)
        header = Header(
            model=model,
            data=data,
            options=self.options,
            versions=_versions(),
            maps=tuple(m for m in maps if m.inputs is not None or m.outputs),
            sets={},
            forms={},
            aliases={
                names.get(alias, alias): names[p.name]
                for p in self._parameters.values()
                for alias in p.aliases
            },
            without={
                kind: dict(find_lacking(kind, seen, main, maps, names, self.options))
                for kind in self.options.statistics
            },
        )
        renamed = {name: _renamed(totals, names) for name, totals in self.totals.items()}
        result = statistics_of(header, renamed)
        bad = [
            f"'{name}' holds NaN or Inf; the model overflows on some example"
            for name in result.arrays.specs
            if not bool(result.arrays[name].isfinite().all())
        ]
        if bad:
            raise NonFiniteError(bad)
        return result


@dataclass(frozen=True)
class Watches:
    """What is watched in batches of one kind."""

    structure: Structure
    inputs: InputWatch
    gradients: GradientWatch | None

    @contextmanager
    def on(self, current: Pass) -> Iterator[None]:
        """Watch a batch on its way through the model."""
        both = (self.inputs,) if self.gradients is None else (self.inputs, self.gradients)
        for watch in both:
            watch.current = current
        try:
            yield
        finally:
            for watch in both:
                watch.current = None

    def num_sequences(self) -> int:
        """Of the batch that is watched; 1 if none is."""
        current = self.inputs.current
        return 1 if current is None else current.examples.num_sequences


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a transformers model and its parts."""
    return [module.config for module in model.modules() if hasattr(module, "config")]


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            "a batch does not fit into memory; use a smaller --batch-size or --max-tokens"
        ) from error


def _run_plain(model: nn.Module, item: Any) -> Any:
    if isinstance(item, Batch):
        return model(**item.inputs)
    if isinstance(item, Mapping):
        return model(**item)
    return model(*item) if isinstance(item, (tuple, list)) else model(item)


def _check_targets(prediction: Prediction, numbers: Any) -> None:
    targets, num_classes = prediction.targets, prediction.logits.shape[-1]
    if targets is None:
        return
    wrong = (targets < 0) | (targets >= num_classes)
    if prediction.logits.ndim == 3:
        wrong = wrong & (targets != IGNORED)
        nothing = (targets == IGNORED).all(1).nonzero()[:, 0].tolist()
        if nothing:
            raise DataError(
                [f"example {numbers[n]}: has no target to predict; leave it out" for n in nothing]
            )
    if bool(wrong.any()):
        bad = wrong.nonzero()
        raise DataError(
            [
                f"example {numbers[where[0]]}: target {int(targets[tuple(where)])} is out of "
                f"range, the model has {num_classes} classes"
                for where in bad.tolist()[:10]
            ]
        )


def _renamed(totals: Totals, names: Mapping[str, str]) -> Totals:
    return Totals(
        totals.dtype,
        totals.num_examples,
        totals.inputs,
        totals.outputs,
        {names[n]: v for n, v in totals.squares.items()},
        {names[n]: v for n, v in totals.blocks.items()},
    )


def _versions() -> dict[str, str]:
    versions = {"matsmerge": __version__, "torch": str(torch.__version__)}
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        versions["transformers"] = str(transformers.__version__)
    return versions
