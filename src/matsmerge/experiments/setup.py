"""A suite's steps: what is done for one way to fine-tune and one seed.

Steps are made when they are asked for; those that are the same are done once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matsmerge.errors import DataError
from matsmerge.experiments.results import ENSEMBLE, INDIVIDUAL
from matsmerge.experiments.step import Given, Step, digest
from matsmerge.experiments.suite import Made, MethodOfSuite, Suite, Variant
from matsmerge.methods.mats import Mats
from matsmerge.methods.method import Method
from matsmerge.recipes.recipe import make_recipe

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
NOTHING = MethodOfSuite(method={"name": "task_arithmetic", "scale": 0.0})  # gives the base


@dataclass(frozen=True)
class Local:
    """What is taken from local files instead of where the suite says."""

    base: Given | None = None
    data: Mapping[str, Given] = field(default_factory=dict)  # by task


def local(base: Path | None, data: Path | None, tasks: Collection[str]) -> Local:
    """A folder with a model, and one with a file or a folder for each task."""
    found: dict[str, Given] = {}
    for task in tasks if data is not None else ():
        assert data is not None
        for place in (data / task, *(data / f"{task}{suffix}" for suffix in SUFFIXES)):
            if place.exists():
                found[task] = Given.at(place)
                break
    if data is not None and not found:
        raise DataError(
            f"--data {data}: has nothing for the suite's tasks ({', '.join(tasks)}); expected "
            "TASK.jsonl or a folder TASK with train.jsonl and so on"
        )
    return Local(None if base is None else Given.at(base), found)


@dataclass(frozen=True)
class Setup:
    """One variant of a suite with one seed."""

    suite: Suite
    variant_name: str
    seed: int
    local: Local = Local()

    @property
    def variant(self) -> Variant:
        return self.suite.variants[self.variant_name]

    @property
    def methods(self) -> dict[str, MethodOfSuite]:
        """Those that make sense for the variant."""
        return {
            name: method
            for name, method in self.suite.methods.items()
            if method.variants is None or self.variant_name in method.variants
        }

    @property
    def _name(self) -> str:
        return f"{self.variant_name} {self.seed}"

    # What everything begins with.

    def _base(self) -> tuple[dict[str, Any], dict[str, Step | Given]]:
        """The base model as settings or as a need."""
        base = self.variant.base or self.suite.base
        if self.local.base is not None:
            return {"base": None}, {"base": self.local.base}
        if isinstance(base, Made):
            settings = {"source": base.source, "settings": base.settings}
            return {"base": None}, {"base": Step("make", f"base {base.source}", settings)}
        if Path(base).expanduser().exists():
            return {"base": None}, {"base": Given.at(Path(base).expanduser())}
        return {"base": base}, {}

    def _tasks(self, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Step | Given]]:
        """Tasks as settings, their data as needs."""
        tasks: list[dict[str, Any]] = []
        needs: dict[str, Step | Given] = {}
        contents: dict[str, str] = {}
        for name in names:
            task = self.suite.tasks[name]
            content = task.as_task_file()
            content |= {"name": name, "seed": task.seed + self.seed}
            if name in self.local.data:
                needs[f"data:{name}"] = self.local.data[name]
                content.pop("data", None)
                if self.local.data[name].path.is_dir():
                    content.pop("splits", None)
            elif task.source is not None:
                settings = {"source": task.source, "settings": task.settings}
                needs[f"data:{name}"] = Step("make", f"data {name}", settings)
            tasks.append(content)
            for key in ("data", "head", "tokenizer"):
                contents |= _contents(content.get(key))
        return {"tasks": tasks, **({"contents": contents} if contents else {})}, needs

    # Models and their statistics.

    def _train(self, name: str, tasks: list[str], options: Mapping[str, Any], **more: Any) -> Step:
        base, base_needs = self._base()
        described, data = self._tasks(tasks)
        settings = {**base, **described, "options": {**options, "seed": self.seed}}
        return Step("train", f"train {self._name} {name}", settings, {**base_needs, **data, **more})

    def model(self, task: str) -> Step | None:
        """The model that was fine-tuned for a task; None if the suite names one."""
        if self.variant.models is not None and task in self.variant.models:
            return None
        return self._train(task, [task], self.variant.training)

    def joint(self) -> Step | None:
        if self.variant.joint is None:
            return None
        options = {**self.variant.training, **self.variant.joint}
        return self._train("joint", list(self.suite.tasks), options)

    def sequential(self, donor: str, target: str, options: Mapping[str, Any]) -> Step:
        """A target task's model that starts from a donor's."""
        own = {**self.variant.training, "fresh_head": True, **options}
        if own.pop("adapter", None) is not None:
            own.pop("target_modules", None), own.pop("feedforward_modules", None)
        start = self.model(donor)
        assert start is not None
        return self._train(f"{donor} then {target}", [target], own, start=start)

    def statistics(
        self, task: str, *, expectation: str | None = None, split: str | None = None
    ) -> Step:
        """Of a task's own model, on its own data."""
        variant = self.variant
        described, needs = self._tasks([task])
        named = (variant.models or {}).get(task)
        settings = {
            **described,
            **({"model_contents": changed} if (changed := _contents(named)) else {}),
            "model": named,
            "statistics": variant.statistics,
            "expectation": expectation or variant.expectation,
            "split": split or variant.split,
            "num_examples": variant.num_examples,
            "batch_size": self.suite.batch_size,
            "seed": self.seed,
        }
        if (model := self.model(task)) is not None:
            needs["model"] = model
        how = " ".join(part for part in (expectation, split) if part)
        return Step("collect", f"collect {self._name} {task} {how}".strip(), settings, needs)

    def _models(self, tasks: Iterable[str]) -> tuple[dict[str, Any], dict[str, Step | Given]]:
        steps = {f"model:{task}": self.model(task) for task in tasks}
        needs: dict[str, Step | Given] = {n: s for n, s in steps.items() if s is not None}
        models = dict(self.variant.models or {})
        given = {task: _contents(model) for task, model in models.items()}
        changed = {"model_contents": given} if any(given.values()) else {}
        return {"models": models, **changed}, needs

    def _scoring(self) -> dict[str, Any]:
        return {
            "num_validation": self.suite.num_validation,
            "num_test": self.suite.num_test,
            "batch_size": self.suite.batch_size,
        }

    # Merges and scores.

    def merging(
        self,
        name: str,
        method: MethodOfSuite,
        *,
        merged: list[str] | None = None,
        scored: list[str] | None = None,
        init: Step | None = None,
        keep_model: bool = False,
        expectation: str | None = None,
        split: str | None = None,
    ) -> Step:
        """A method, tuned by validation and tested; by default of all models on all tasks."""
        merged = merged or list(self.suite.tasks)
        base, base_needs = self._base()
        models, model_needs = self._models(merged)
        described, data = self._tasks(scored or merged)
        needs: dict[str, Step | Given] = {**base_needs, **model_needs, **data}
        if needs_statistics(method) or init is not None:
            for task in merged:
                needs[f"statistics:{task}"] = self.statistics(
                    task, expectation=expectation, split=split
                )
        if init is not None:
            needs["init"] = init
        settings = {
            **base, **models, **described, **self._scoring(),
            "merged": merged,
            "method": method.method,
            "with_defaults": _parsed(method).model_dump(mode="json"),  # which may change, too
            "search": method.search,
            "heads": self.variant.heads,
            "keep_model": keep_model,
        }  # fmt: skip
        return Step("merge", f"merge {self._name} {name}", settings, needs)

    def compared(self, name: str) -> Step:
        """One of the suite's methods on all tasks."""
        return self.merging(name, self.methods[name], keep_model=True)

    def untouched(self) -> Step:
        """The base model, with each task's head."""
        return self.merging("base", NOTHING)

    def testing(self, row: str, models: Mapping[str, Step], tasks: list[str] | None = None) -> Step:
        """What was not merged."""
        described, data = self._tasks(tasks or list(self.suite.tasks))
        settings = {**described, **self._scoring(), "row": row, "models": {}}
        if row in (INDIVIDUAL, ENSEMBLE):
            settings |= self._models(tasks or self.suite.tasks)[0]
        needs: dict[str, Step | Given] = {f"model:{n}": step for n, step in models.items()}
        return Step("test", f"test {self._name} {row}", settings, {**needs, **data})

    def individual(self, tasks: list[str] | None = None) -> Step:
        _, steps = self._models(tasks or self.suite.tasks)
        models = {n.removeprefix("model:"): s for n, s in steps.items() if isinstance(s, Step)}
        return self.testing(INDIVIDUAL, models, tasks)

    def ensemble(self) -> Step:
        _, steps = self._models(self.suite.tasks)
        models = {n.removeprefix("model:"): s for n, s in steps.items() if isinstance(s, Step)}
        return self.testing(ENSEMBLE, models)

    # Studies.

    def following(self, name: str, method: str | dict[str, Any], iterations: list[int]) -> Step:
        """Scores on the way of a solver."""
        step = self.merging(name, MethodOfSuite(method=method))
        settings = {**step.settings, "iterations": iterations}
        return Step("follow", f"follow {self._name} {name}", settings, step.needs)

    def costs(self, repeats: int) -> Step:
        base, needs = self._base()
        models, model_needs = self._models(self.suite.tasks)
        needs |= model_needs
        needs |= {f"merge:{n}": self.compared(n) for n in self.methods}
        needs |= {f"statistics:{t}": self.statistics(t) for t in self.suite.tasks}
        if (joint := self.joint()) is not None:
            needs["joint"] = joint
        lengths = [task.max_length or 138 for task in self.suite.tasks.values()]
        settings = {
            **base,
            **models,
            "merged": list(self.suite.tasks),
            "method": "average",
            "heads": self.variant.heads,
            "methods": list(self.methods),
            "repeats": repeats,
            "length": sum(lengths) / len(lengths),
        }
        return Step("costs", f"costs {self._name}", settings, needs)

    def landscape(self, plane: list[str], layer: str, size: int, num_examples: int) -> Step:
        base, base_needs = self._base()
        described, data = self._tasks(plane)
        models, model_needs = self._models(plane)
        settings = {
            **base, **described, **models, "plane": plane, "layer": layer, "size": size,
            "num_examples": num_examples, "split": self.variant.split,
        }  # fmt: skip
        needs = {**base_needs, **data, **model_needs}
        return Step("landscape", f"landscape {self._name}", settings, needs)

    def subspaces(self, energy: float) -> Step:
        described, _ = self._tasks(self.suite.tasks)
        needs = {f"statistics:{task}": self.statistics(task) for task in self.suite.tasks}
        return Step("subspaces", f"subspaces {self._name}", {**described, "energy": energy}, needs)


def _contents(data: str | Mapping[str, str] | None) -> dict[str, str]:
    """What local files hold that a suite names itself; the hub's are known by their names."""
    sources = [] if data is None else [data] if isinstance(data, str) else list(data.values())
    return {source: digest(Path(source)) for source in sources if Path(source).exists()}


def needs_statistics(method: MethodOfSuite) -> bool:
    """Does a method look at statistics?"""
    made = _parsed(method)
    return isinstance(made, Mats) and bool(made.needed_statistics)


def _parsed(method: MethodOfSuite) -> Method:
    recipe = make_recipe({"models": ["a", "b"], "base": "c", "method": method.method})
    return recipe.method.at_depth(0)
