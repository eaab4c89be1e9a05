"""A collection of statistics: a model, and the sums of what it did on its batches so far."""

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint, first_line
from matsmerge.errors import NonFiniteError, RecipeError, ResourceError, StatisticsError
from matsmerge.linalg.nystrom import least_dim
from matsmerge.models.experts import ExpertsApart
from matsmerge.statistics.coded_sketches import CODES
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.coverage import Coverage
from matsmerge.statistics.input_watch import WatchedModel
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.moment_sum import MomentStatistic
from matsmerge.statistics.kinds.statistic import (
    GradientStatistic,
    InputStatistic,
    OutputStatistic,
)
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.own_inputs import OwnInputs
from matsmerge.statistics.parameters import (
    PLAIN,
    WITH_METRIC,
    FindMap,
    Owned,
    find_maps,
    find_parameters,
    join_tied,
)
from matsmerge.statistics.shared_inputs import SharedInputs
from matsmerge.statistics.shown_batch import ShownBatch, show
from matsmerge.statistics.statistics import (
    HELD_OUT,
    MAIN,
    Header,
    Origin,
    Statistics,
    WholeNumber,
    statistics_of,
)
from matsmerge.statistics.statistics_file import parse_dtype
from matsmerge.statistics.totals import SetState, State, Totals
from matsmerge.statistics.watches import Lesson, Watches
from matsmerge.tasks.batch import Batch
from matsmerge.version import versions

Loss = Callable[[nn.Module, Any], Any]


class CollectionState(State):
    """All of a collection but the arrays."""

    num_batches: WholeNumber
    sets: dict[str, SetState]
    leaders: dict[str, str]  # of maps that share an input
    lessons: list[Lesson]
    notes: list[str]


class NumValues(NamedTuple):
    """How many numbers statistics have."""

    sketched: int
    other: int
    summed: int  # until they are done

    def file_bytes(self, rank: int | None, dtype: str = "auto") -> int:
        of_sketch, other = parse_dtype(dtype, "sketch"), parse_dtype(dtype)
        num_bytes = of_sketch.itemsize * self.sketched + other.itemsize * self.other
        if rank is not None and of_sketch == CODES:  # beside which the diagonal is in float32
            num_bytes += 3 * self.sketched // (rank + 1)
        return num_bytes


class Collection:
    """Adds batches to totals, and makes statistics of them.

    `names` maps the model's parameters to those of its checkpoint; parameters that are not in it
    get no statistics. With `modules`, only these are seen as linear maps; `kinds_of_maps` says
    otherwise than by the kinds of statistics what is seen as one.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CollectionOptions,
        loss: Loss | None,
        names: Mapping[str, str] | None = None,
        own_inputs: OwnInputs | None = None,
        modules: Container[str] | None = None,
        kinds_of_maps: Sequence[FindMap] | None = None,
    ) -> None:
        if own_inputs is None and any(kind.is_paired for kind in options.collected):
            raise RecipeError(
                "pairs: are of a model and of the merged one, and collected when these are merged "
                "with inputs: merged; collect gram or kfac"
            )
        if options.wants_gradients and loss is None:
            kinds = ", ".join(kind.name for kind in options.collected if kind.needs_loss)
            raise RecipeError(
                f"{kinds}: needs a loss; give loss=f with f(model, batch) returning the negative "
                "log-likelihood of each example, or logits and targets"
            )
        self.options = options
        # Along a merged model nothing is known of experts: each model routes tokens its own way.
        self._experts = ExpertsApart(model if own_inputs is None else nn.Module())
        with self._experts.installed():
            found = find_parameters(model, options.parameters)
            names = {name: name for name in found} if names is None else names
            parameters = join_tied({n: owned for n, owned in found.items() if n in names}, names)
            has_metric = any(isinstance(kind, OutputStatistic) for kind in options.collected)
            default = WITH_METRIC if has_metric else PLAIN
            maps = find_maps(model, parameters, kinds_of_maps or default)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        dtype = reduce(torch.promote_types, dtypes, torch.float32)
        sets = [MAIN, HELD_OUT] if options.held_out else [MAIN]
        self.totals = {of: Totals(dtype, rank=options.sketch_rank) for of in sets}
        self._shared = SharedInputs()
        self._subject = WatchedModel(
            model,
            loss or _run_plain,
            options,
            parameters,
            names,
            [m for m in maps if modules is None or m.name in modules],
            self.totals,
            self._shared,
            own_inputs,
        )
        if modules is None:
            _check_rank(options, self._subject.maps)
        self._watches: dict[tuple[bool, ...], Watches] = {}  # by what of a batch is padded
        self._last: Watches | None = None  # of the last batch
        self._lessons: dict[int, Lesson] = {}  # of an interrupted collection, by batch
        self._num_batches = 0
        self.notes: list[str] = []  # what the user should know of how it went

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model as it must be while batches are added; afterwards it is as it was."""
        with self._experts.installed(), self._running(self._subject.model):
            yield

    @contextmanager
    def _running(self, model: nn.Module) -> Iterator[None]:
        modes = {module: module.training for module in model.modules()}
        # By name: a model that is spread over devices replaces its parameters as it runs.
        named = partial(model.named_parameters, remove_duplicate=False)
        required = {name: parameter.requires_grad for name, parameter in named()}
        fast_path = torch.backends.mha.get_fastpath_enabled()
        # Its fused kernels do not call the modules they stand for.
        torch.backends.mha.set_fastpath_enabled(False)
        model.eval()
        # Nothing is generated here, and what a cache holds would come up again in a replay.
        configs: list[Any] = [getattr(module, "config", None) for module in modes]
        caching = [config for config in configs if getattr(config, "use_cache", False)]
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
            self._watches_for(show(item, self._subject.model, self.num_examples))

    def add(self, item: Any, to: str = MAIN) -> int:
        """Run the model on a batch and add what it does; returns the number of examples."""
        totals = self.totals[to]
        shown = show(item, self._subject.model, self.num_examples)
        with _memory_errors():
            self._last = self._watches_for(shown)
            self._last.add(shown, totals)
        totals.num_examples += len(shown.examples)
        self._num_batches += 1
        return len(shown.examples)

    def skip(self, item: Any) -> None:
        """Pass over the next batch, which an interrupted collection added.

        What it learnt from the batch is learnt again, as what it decided then.
        """
        self._num_batches += 1
        lesson = self._lessons.get(self._num_batches)
        if lesson is None:
            return
        shown = show(item, self._subject.model, 0)
        if list(shown.is_padded) != lesson.is_padded:
            raise StatisticsError(
                f"batch {self._num_batches} is padded in another way than when it was collected "
                "from; start anew with --overwrite"
            )
        with _memory_errors():
            watches = Watches(self._subject, shown, lesson, self._hooks)
        self._watches[shown.is_padded] = watches

    def _watches_for(self, shown: ShownBatch) -> Watches:
        """What to watch in a batch; models take other ways with and without padding."""
        watches = self._watches.get(shown.is_padded)
        notes = []
        if watches is None:
            lesson = Lesson(
                batch=self._num_batches + 1,
                is_padded=list(shown.is_padded),
                is_one_by_one=False,
                is_tried_out=False,
            )
            watches = Watches(self._subject, shown, lesson, self._hooks)
            notes = watches.try_out(shown)
            self._watches[shown.is_padded] = watches
        elif not watches.lesson.is_tried_out and len(shown.examples) > 1:
            notes = watches.try_out(shown)
        self.notes += [note for note in notes if note not in self.notes]
        return watches

    @property
    def is_one_by_one(self) -> bool:
        """Was every example of the last batch run alone?"""
        return self._last is not None and self._last.lesson.is_one_by_one

    @property
    def num_examples(self) -> int:
        return sum(totals.num_examples for totals in self.totals.values())

    def state(self) -> tuple[CollectionState, dict[str, Tensor]]:
        """All that there is so far, exactly; taking it changes nothing."""
        state = CollectionState(
            num_batches=self._num_batches,
            sets={of: totals.state() for of, totals in self.totals.items()},
            leaders=self._shared.leaders,
            lessons=[watches.lesson for watches in self._watches.values()],
            notes=self.notes,
        )
        arrays = {
            f"{of}/{name}": values.cpu()
            for of, totals in self.totals.items()
            for name, values in totals.parts()
        }
        _check_finite(arrays.items())
        return state, arrays

    def restore(self, state: CollectionState, arrays: Checkpoint) -> None:
        """Go on from the state of an interrupted collection, once its batches are skipped."""
        if state.sets.keys() != self.totals.keys():
            raise StatisticsError(
                f"expected the sets {', '.join(self.totals)}, found {', '.join(state.sets)}"
            )
        maps = {m.name: m for m in self._subject.maps}
        unknown = [m for item in state.leaders.items() for m in item if m not in maps]
        if unknown:
            raise StatisticsError(f"there is no map '{unknown[0]}' in the model")
        for of, totals in self.totals.items():
            found = [name for name in arrays.specs if name.startswith(f"{of}/")]
            parts = {name.removeprefix(f"{of}/"): arrays[name] for name in found}
            totals.load(state.sets[of], parts, maps, self._subject.parameters)
        self._shared.include(state.leaders)
        self._lessons = {lesson.batch: lesson for lesson in state.lessons}
        self.notes = list(state.notes)

    def expected_bytes(self, dtype: str = "auto") -> int:
        """About the size of a file of statistics; known once a batch was looked at."""
        return self.num_values(self._shared.leaders).file_bytes(self.options.sketch_rank, dtype)

    def num_values(
        self,
        leaders: Mapping[str, str],
        has: Callable[[LinearMap | Owned], bool] = lambda _: True,
    ) -> NumValues:
        """About how many numbers are stored, of all maps and parameters or of some.

        `leaders` says which maps share an input.
        """
        firsts = set(leaders.values())
        rank = self.options.sketch_rank
        num: Counter[bool] = Counter()  # by whether they are of sketches
        num_summed = 0
        for kind in self.options.collected:
            targets: Iterable[LinearMap | Owned] = self._subject.maps
            if isinstance(kind, GradientStatistic):
                targets = self._subject.parameters.values()
            elif isinstance(kind, InputStatistic):
                targets = [m for m in self._subject.maps if m.name in firsts]
            wanted = [t for t in targets if has(t) and kind.refuses(t) is None]
            for t in wanted:
                is_sketch = (
                    isinstance(kind, MomentStatistic)
                    and isinstance(t, LinearMap)
                    and kind.has_sketch(t, rank)
                )
                num[is_sketch] += len(self.totals) * kind.num_values(t, rank)
                num_summed += len(self.totals) * kind.num_summed(t, rank)
        return NumValues(num[True], num[False], num_summed)

    def statistics(self, model: Origin, data: tuple[Origin, ...]) -> Statistics:
        """What has been collected, as means, under the checkpoint's names.

        Second moments are as they add up; `finish` makes of them what is kept.
        """
        names = self._subject.names
        coverage = Coverage(self._subject, self._watches.values())
        header = Header(
            model=model,
            data=data,
            options=self.options,
            versions=versions("torch", *({"transformers"} & sys.modules.keys())),
            maps=tuple(coverage.maps()),
            sets={},
            forms={},
            aliases={
                names.get(alias, alias): names[p.name]
                for p in self._subject.parameters.values()
                for alias in p.aliases
            },
            without={
                kind: {names[name]: why for name, why in coverage.lacking(KINDS[kind])}
                for kind in self.options.statistics
            },
        )
        sets = {of: (t.num_examples, t.summed(names)) for of, t in self.totals.items()}
        marks = {of: t.marks if t.marks.num else None for of, t in self.totals.items()}
        result = statistics_of(header, sets, marks)
        _check_finite((name, result.arrays[name]) for name in result.arrays.specs)
        return result


def _check_rank(options: CollectionOptions, maps: Iterable[LinearMap]) -> None:
    """Refuse a rank that was asked for and that no layer is wide enough for."""
    rank = options.sketch_rank
    if rank is None or options.rank == "auto":
        return
    moments = [kind for kind in options.collected if isinstance(kind, MomentStatistic)]
    if not moments:
        kinds = ", ".join(kind.name for kind in options.collected)
        raise RecipeError(f"rank: is of gram and kfac, and {kinds} has none; leave it out")
    pairs = [(kind, m) for m in maps for kind in moments if kind.refuses(m) is None]
    if not any(kind.has_sketch(m, rank) for kind, m in pairs):
        widest = max((kind.dim(m) for kind, m in pairs if m.layout != "embedding"), default=0)
        raise RecipeError(
            f"rank: sketches of rank {rank} are smaller than second moments of at least "
            f"{least_dim(rank)} inputs or outputs, and the widest that is collected has {widest}; "
            "give a smaller rank, or full"
        )


def _check_finite(arrays: Iterable[tuple[str, Tensor]]) -> None:
    NonFiniteError.raise_all(
        f"'{name}' holds NaN or Inf; the model overflows on some example"
        for name, values in arrays
        if not bool(values.isfinite().all())
    )


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise ResourceError(
            "a batch or its statistics do not fit into memory; use a smaller --batch-size or "
            f"--max-tokens, or fewer --parameters ({first_line(error)})"
        ) from error


def _run_plain(model: nn.Module, item: Any) -> Any:
    if isinstance(item, Batch):
        return model(**item.inputs)
    if isinstance(item, Mapping):
        return model(**item)
    return model(*item) if isinstance(item, (tuple, list)) else model(item)
