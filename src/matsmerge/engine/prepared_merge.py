"""Before a merge: open, align, gather statistics, plan; all that is wrong is said here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.alignment import Alignment, align, matches
from matsmerge.checkpoints.chat_templates import choose_template
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.companions import code_notes, companion_files
from matsmerge.checkpoints.model_parts import complete_models
from matsmerge.checkpoints.public_names import public_name, public_text
from matsmerge.checkpoints.source import Source
from matsmerge.checkpoints.vocabularies import Comparison, compare_tokenizers
from matsmerge.engine.adapter_output import AdapterOutput, plan_output
from matsmerge.engine.devices import find_devices, has_float64
from matsmerge.engine.evidence import StatisticsSource, gather_evidence, kinds_needed
from matsmerge.engine.fp8_output import plan_fp8
from matsmerge.engine.layout import Layout, make_layout
from matsmerge.engine.matched_heads import HeadMatching
from matsmerge.engine.merge_inputs import Inputs, gather_inputs
from matsmerge.engine.merged_vocabulary import MergedVocabulary, merge_vocabularies
from matsmerge.engine.model_card import inherit_metadata
from matsmerge.engine.permuted_statistics import check_rows, permute_evidence
from matsmerge.engine.plan import Plan, make_plan
from matsmerge.engine.prefix_merge import PrefixMerge
from matsmerge.engine.prefix_preparation import prepare_prefix, read_data
from matsmerge.engine.stacked_models import stack_models
from matsmerge.engine.worker import FINAL
from matsmerge.errors import RecipeError, StatisticsError
from matsmerge.methods.method import Method
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.passthrough import Passthrough
from matsmerge.problems import counted, listed
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import Rule, check_patterns, make_rules
from matsmerge.statistics.statistics import MAIN
from matsmerge.tasks.head_record import HeadRecord, record_head


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that has been checked and planned; nothing but headers has been read.

    Along a prefix, where `evidence` lacks what is about inputs, data and a model have been read.
    """

    recipe: Recipe
    alignment: Alignment
    plan: Plan
    evidence: tuple[Evidence, ...]
    output: AdapterOutput
    companions: tuple[Path, ...]  # files to copy beside the weights
    notes: tuple[str, ...]
    pretrained: Checkpoint | None = None  # the model that adapters are on, if it was needed
    prefix: PrefixMerge | None = None
    heads: HeadMatching | None = None  # where heads are matched to the merged model
    head_records: Mapping[str, HeadRecord] = field(default_factory=dict)  # by model name
    inherited: Mapping[str, Any] = field(default_factory=dict)  # of the models' cards
    chat_template: Any = None  # to write, where it is not that of the companions
    config_changes: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    vocabulary: MergedVocabulary | None = None  # that embeddings are brought to, where it was asked

    @property
    def models(self) -> dict[int | None, str]:
        """The models to write, by iteration, and the folder of each within the output."""
        return {at: f"iteration-{at}" for at in self.recipe.trajectory} or {FINAL: "."}

    @property
    def methods(self) -> list[Method]:
        """The methods of all parameters, each once."""
        return list(dict.fromkeys(p.rule.method for p in self.plan.parameters))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Everything that is read, models first."""
        found = [model.checkpoint for model in self.alignment.everyone]
        if self.pretrained is not None:
            found.append(self.pretrained)
        return found + [one.statistics.arrays for one in self.evidence]

    @property
    def public_notes(self) -> list[str]:
        """What was decided without being asked, without local paths."""
        labels = {checkpoint.label for checkpoint in self.checkpoints}
        return [public_text(note, labels) for note in self.notes]

    @property
    def num_head_bytes(self) -> int:
        models = self.alignment.models
        return sum(m.checkpoint.spec(name).num_bytes for m in models for name in m.heads)

    @property
    def num_companion_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.companions)

    @property
    def written(self) -> Mapping[str, TensorSpec]:
        """All tensors of the output."""
        return self.output.finish.specs if self.output.finish else self.plan.written

    def layout(self, max_shard_bytes: int) -> Layout:
        if self.output.config is None:
            return make_layout(self.written, "model", max_shard_bytes)
        # An adapter is one file.
        num_bytes = sum(spec.num_bytes for spec in self.written.values())
        return make_layout(self.written, "adapter_model", num_bytes)


def prepare(
    recipe: Recipe,
    sources: Mapping[str, Source] | None = None,
    statistics: Mapping[str, StatisticsSource] | None = None,
    *,
    force: bool = False,
) -> PreparedMerge:
    """Open and check everything a recipe names.

    `sources` replaces paths of models, `statistics` paths of statistics, both by model name. With
    `force`, statistics of another model are used all the same.
    """
    inputs = gather_inputs(recipe, sources or {})
    _check_start(recipe, inputs)
    completed = complete_models(inputs.models, inputs.base)
    inputs = replace(inputs, models=completed.models, base=completed.base)
    dtype = recipe.torch_dtype if inputs.view != "joint" else None
    # The base's configuration and tokenizer go with the result, or else the first model's; those
    # of a model that others are a part of before all.
    first = completed.whole or inputs.pretrained or inputs.base
    sources_of_files = [first, *inputs.models.values()]
    if inputs.writes_adapter:
        sources_of_files = list(inputs.models.values())
    of = next((c for c in sources_of_files if c is not None and c.folder is not None), None)
    vocabulary = merge_vocabularies(recipe, inputs, of) if recipe.tokenizer else None
    files = vocabulary.folder if vocabulary else of.folder if of else None
    tokenizers = _compare_tokenizers(recipe, inputs, files)
    stacked = stack_models(recipe, inputs)
    config_changes = stacked.config_changes(of)
    inputs = stacked.inputs
    alignment = align(
        inputs.models,
        inputs.base,
        heads=[*recipe.heads, *inputs.heads],
        dtype=dtype,
        may_differ=lambda name: _taken_from_one(recipe, name),
        tokenizer_problems=tokenizers.problems,
        view_rows=vocabulary.view_rows if vocabulary else None,
    )
    unused = check_patterns(recipe, alignment.names)
    rules = make_rules(recipe, alignment.names, stacked.taking)
    for n in alignment.names:
        if n in completed.copied and rules[n].method.only_model is None:
            rules[n] = replace(rules[n], method=Passthrough(model=completed.copied[n]))
    if inputs.view == "vectors":
        rules = {n: replace(rule, method=rule.method.for_vectors()) for n, rule in rules.items()}
    elif inputs.view == "joint":
        _check_joint(recipe, rules)
    output = plan_output(recipe, inputs, alignment, rules)
    fp8 = plan_fp8(recipe, alignment, output, of)
    methods = list(dict.fromkeys(rule.method for rule in rules.values()))
    is_along_prefix = any(method.uses_merged_inputs for method in methods)
    if is_along_prefix and inputs.view == "vectors":
        _check_modules(inputs)
    is_permuted = vocabulary is not None and not vocabulary.rows.changes_nothing
    if is_permuted and (is_along_prefix or recipe.matches_heads):
        raise RecipeError(
            "inputs: merged and match_heads run one model on everyone's data, which has the tokens "
            "of one vocabulary; use inputs: own, and match_heads: false, with this tokenizer:"
        )
    apart = [m for m in (x.without_inputs() for x in methods) if m] if is_along_prefix else methods
    evidence = gather_evidence(
        recipe,
        alignment,
        apart,
        statistics or {},
        force=force,
        may_be_collected=is_along_prefix,
    )
    if vocabulary is not None and is_permuted:
        evidence = permute_evidence(vocabulary.rows, evidence, alignment)
    prefix = None
    if is_along_prefix:
        following = [method for method in methods if method.uses_merged_inputs]
        matches_outputs = following[0].matches_outputs
        if any(method.matches_outputs != matches_outputs for method in following):
            raise RecipeError("targets: must be the same of all methods with inputs: merged")
        prefix = prepare_prefix(
            recipe,
            alignment,
            evidence,
            matches_outputs=matches_outputs,
            collected=() if evidence else tuple(kinds_needed(apart)),
        )
    plan = make_plan(
        alignment,
        rules,
        dtype,
        output,
        prefix.evidence if prefix else evidence,
        len(recipe.trajectory),
        fp8.scaled,
    )
    _check_covered(plan, methods)
    if vocabulary is not None and is_permuted:
        check_rows(vocabulary.rows, plan.layers, alignment)
    companions = companion_files(of.folder) if of else ()
    code = code_notes(companions, public_name(of.label)) if of else []
    if vocabulary is not None:
        companions = vocabulary.companions(companions)
        code += vocabulary.notes
    inherited, card_notes = inherit_metadata(
        {model.name: model.checkpoint.folder for model in alignment.models}
    )
    heads, kept_heads = _match_heads(recipe, alignment)
    code += kept_heads
    if heads is not None and recipe.match_heads is None:
        names = dict.fromkeys(n for m in alignment.models for n in m.heads)
        code.append(f"matched to the merged model, on each model's data: {', '.join(names)}")
    code += _poor_models(recipe, evidence)
    along = [*(prefix.notes_on(plan) if prefix else ()), *_otherwise_notes(plan)]
    along += _unused_notes(plan, alignment, evidence)
    notes = *inputs.notes, *completed.notes, *alignment.notes, *fp8.notes
    along += _device_notes(plan, recipe.device)
    return PreparedMerge(
        recipe,
        alignment,
        plan,
        evidence,
        output,
        companions,
        (*notes, *tokenizers.notes, *unused, *code, *card_notes, *along),
        inputs.pretrained,
        prefix,
        heads,
        _head_records(recipe, alignment),
        inherited,
        tokenizers.chat_template,
        {**config_changes, **fp8.config_changes},
        vocabulary,
    )


def _compare_tokenizers(recipe: Recipe, inputs: Inputs, output: Path | None) -> Comparison:
    """Compare all tokenizers; `output` is the folder whose files go with the result."""
    base = inputs.pretrained or inputs.base
    found = compare_tokenizers(
        {name: model.folder for name, model in inputs.models.items()},
        None if base is None else ("the base", base.folder),
        output,
        ids=recipe.tokenizer is None,
    )
    if recipe.chat_template is not None:
        folders = [model.folder for model in (*inputs.models.values(), base) if model]
        found.chat_template, said = choose_template(recipe.chat_template, folders, output)
        found.notes += said
    if recipe.ignore_tokenizers:
        ignored = [f"ignored: {problem.partition(';')[0]}" for problem in found.problems]
        return Comparison([], [*found.notes, *ignored], found.chat_template)
    return found


def _match_heads(recipe: Recipe, alignment: Alignment) -> tuple[HeadMatching | None, Sequence[str]]:
    """The heads to match, checked; nothing where no model has one and it was not asked for.

    Beside it, notes on what of them stays as it is.
    """
    have_heads = [model for model in alignment.models if model.heads]
    if not recipe.matches_heads or (not have_heads and recipe.match_heads is None):
        return None, ()
    if not have_heads:
        raise RecipeError(
            "match_heads: no model has a head of its own; say which parameters are theirs with "
            "heads: / --heads PATTERN, or leave it out"
        )
    asked = (one for one in read_data(recipe, alignment) if one.model.heads)
    matching = HeadMatching(tuple(asked))
    return matching, matching.check()


def _head_records(recipe: Recipe, alignment: Alignment) -> dict[str, HeadRecord]:
    """What the file of each head will say of it."""
    return {
        model.name: record_head(
            model.checkpoint.folder, None if entry.data is None else entry.data.task_file.labels
        )
        for model, entry in zip(alignment.models, recipe.models, strict=True)
        if model.heads
    }


def _check_start(recipe: Recipe, inputs: Inputs) -> None:
    """Refuse methods that need a base where there is none; adapters know theirs."""
    if inputs.base is not None:
        return
    RecipeError.raise_all(
        f"{where}method {spec.name} needs a base model (base: / --base)"
        for where, spec in recipe.method_specs()
        if spec.at_depth(0).reads_base or spec.parameters.get("model") == "base"
    )


def _check_modules(inputs: Inputs) -> None:
    """Refuse (IA)^3 adapters of different modules, where one model runs with all their vectors."""
    (label, first), *others = ((a.label, set(a.modules)) for a in inputs.adapters.values())
    RecipeError.raise_all(
        f"{other} and {label} scale different modules, such as '{min(first ^ modules)}'; inputs: "
        "merged runs everyone's data in one model, so train adapters of the same modules, or use "
        "inputs: own"
        for other, modules in others
        if modules != first
    )


def _check_joint(recipe: Recipe, rules: Mapping[str, Rule]) -> None:
    """Refuse methods that give something else on changes than on models."""
    for rule in rules.values():
        if recipe.rank == "concatenate" and rule.method.coefficients(rule.weights) is None:
            raise RecipeError(
                f"rank: concatenate is exact for average and task_arithmetic, which add changes "
                f"up, and not for {rule.method.name}; choose a number as rank"
            )
        if recipe.align == "core_space":
            if not rule.method.works_in_core_space:
                raise RecipeError(
                    f"align: core_space is for methods of changes, such as ties, tsv_m and iso_c, "
                    f"and not for {rule.method.name}; leave it out"
                )
        elif not rule.method.works_on_changes:
            hint = ", or choose core_space" if rule.method.works_in_core_space else ""
            raise RecipeError(
                f"align: knots is for methods that look at single entries of changes, such as "
                f"ties and dare_ties, and not for {rule.method.name}; leave it out{hint}"
            )


def _check_covered(plan: Plan, methods: Iterable[Method]) -> None:
    """Refuse objectives that have nothing for any parameter."""
    layers = plan.layers
    StatisticsError.raise_all(
        f"the objective {name} has nothing for any of the parameters to merge; are the statistics "
        "of these models, and were their layers among the collected ones?"
        for name in sorted({n for method in methods for n in method.idle_objectives(layers)})
    )


def _otherwise_notes(plan: Plan) -> list[str]:
    if not plan.otherwise:
        return []
    names = [p.name for p in plan.otherwise]
    used = dict.fromkeys(p.rule.method.fallback.name for p in plan.otherwise)
    return [
        f"merged by {' or '.join(used)}, since the objective has nothing for them ({len(names)} of "
        f"{len(plan.parameters)} tensors; all are in merge.json): {listed(names, 6)}"
    ]


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


def _poor_models(recipe: Recipe, evidence: Sequence[Evidence]) -> list[str]:
    """Which models did not learn their tasks, as far as labels beside statistics show it."""
    found = []
    for entry, one in zip(recipe.models, evidence, strict=False):  # there may be no statistics
        marks = one.statistics.header.sets[MAIN].marks
        if marks is not None and marks.is_poor:
            found.append(
                f"{entry.name} is a poor model: of the {marks.num} examples its statistics are of "
                f"it gets {marks.accuracy:.0%} right, where always the commonest label would be in "
                f"{marks.majority:.0%}. A merge that matches it closely repeats its mistakes; "
                "`mats advise` says how much weight to give it, or which other method to use"
            )
    return found


def _taken_from_one(recipe: Recipe, name: str) -> bool:
    """Whether the recipe takes this parameter from one model as it is."""
    method = recipe.method.name
    for override in recipe.overrides:
        if override.method and matches(name, override.match):
            method = override.method.get("name", method)
    return method == "passthrough"
