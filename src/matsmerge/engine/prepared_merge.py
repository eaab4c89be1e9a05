"""Before a merge: open, align, gather statistics, plan; all that is wrong is said here."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.alignment import Alignment, align, matches
from matsmerge.checkpoints.chat_templates import choose_template
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.companions import code_notes, companion_files
from matsmerge.checkpoints.model_parts import complete_models
from matsmerge.checkpoints.public_names import public_name, public_text
from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.checkpoints.source import Source
from matsmerge.checkpoints.vocabularies import TokenizerComparison, compare_tokenizers
from matsmerge.engine.adapter_output import AdapterOutput, plan_output
from matsmerge.engine.evidence import StatisticsSource, gather_evidence, kinds_needed
from matsmerge.engine.fp8_output import plan_fp8
from matsmerge.engine.layout import Layout, make_layout
from matsmerge.engine.matched_heads import HeadMatching
from matsmerge.engine.merge_checks import (
    check_covered,
    check_held,
    check_joint,
    check_modules,
    check_start,
)
from matsmerge.engine.merge_inputs import MergeInputs, gather_inputs
from matsmerge.engine.merged_vocabulary import MergedVocabulary, merge_vocabularies
from matsmerge.engine.model_card import inherit_metadata
from matsmerge.engine.permuted_statistics import check_rows, permute_evidence
from matsmerge.engine.plan import Plan, make_plan
from matsmerge.engine.plan_notes import plan_notes, poor_models
from matsmerge.engine.prefix_merge import PrefixMerge
from matsmerge.engine.prefix_preparation import prepare_prefix, read_all_data
from matsmerge.engine.stacked_models import stack_models
from matsmerge.engine.worker import FINAL
from matsmerge.errors import RecipeError
from matsmerge.methods.method import Method
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.passthrough import Passthrough
from matsmerge.recipes.recipe import WIDEST, Recipe
from matsmerge.recipes.rules import Rule, check_patterns, make_rules
from matsmerge.tasks.head_record import HeadRecord, find_heads, record_head


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
    earlier: tuple[Recipe, ...] = ()  # of models that are results of others

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
    def earlier_heads(self) -> dict[str, Path]:
        """Files of heads that the merge before kept apart, where its result is the only model."""
        models = self.alignment.models
        return find_heads(models[0].checkpoint.folder) if len(models) == 1 else {}

    @property
    def heads_apart(self) -> dict[str, list[str]]:
        """The parameters of heads that have files of their own, by task."""
        earlier = {task: list(read_header(f).specs) for task, f in self.earlier_heads.items()}
        return earlier | {m.name: list(m.heads) for m in self.alignment.models if m.heads}

    @property
    def num_head_bytes(self) -> int:
        models = self.alignment.models
        own = sum(m.checkpoint.spec(name).num_bytes for m in models for name in m.heads)
        return own + sum(path.stat().st_size for path in self.earlier_heads.values())

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


def prepare_merge(
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
    check_start(recipe, inputs)
    completed = complete_models(inputs.models, inputs.base)
    inputs = replace(inputs, models=completed.models, base=completed.base)
    dtype = recipe.torch_dtype if inputs.view != "joint" else None
    of = _companion_source(inputs, completed.whole)
    vocabulary = merge_vocabularies(recipe, inputs, of) if recipe.tokenizer else None
    files = vocabulary.folder if vocabulary else of.folder if of else None
    tokenizers = _compare_tokenizers(recipe, inputs, files)
    if vocabulary is not None and recipe.stack:
        inputs = vocabulary.view_inputs(inputs)
    stacked = stack_models(recipe, inputs)
    config_changes = stacked.config_changes(of)
    inputs = stacked.inputs
    alignment = align(
        inputs.models,
        inputs.base,
        heads=[*recipe.heads, *inputs.heads],
        may_mix_dtypes=dtype is not None or recipe.dtype == WIDEST,
        may_differ=lambda name: _taken_from_one(recipe, name),
        tokenizer_problems=tokenizers.problems,
        view_rows=vocabulary.view_rows if vocabulary and not recipe.stack else None,
    )
    unused = check_patterns(recipe, alignment.names)
    rules = make_rules(recipe, alignment.names, stacked.taking)
    rules = _rules_of_view(recipe, inputs, rules, completed.copied)
    output = plan_output(recipe, inputs, alignment, rules)
    fp8 = plan_fp8(recipe, alignment, output, of)
    methods = list(dict.fromkeys(rule.method for rule in rules.values()))
    check_held(methods, [model.name for model in alignment.models])
    is_along_prefix = any(method.uses_merged_inputs for method in methods)
    if is_along_prefix and inputs.view == "vectors":
        check_modules(inputs)
    is_permuted = vocabulary is not None and not vocabulary.rows.changes_nothing
    if is_permuted and (is_along_prefix or recipe.matches_heads):
        raise RecipeError(
            "inputs: merged and match_heads run one model on everyone's data, which has the tokens "
            "of one vocabulary; use inputs: own, and match_heads: false, with this tokenizer:"
        )
    apart = [m for m in (x.without_inputs() for x in methods) if m] if is_along_prefix else methods
    evidence = gather_evidence(
        recipe, alignment, apart, statistics or {}, force=force, may_be_collected=is_along_prefix
    )
    if vocabulary is not None and is_permuted:
        evidence = permute_evidence(vocabulary.rows, evidence, alignment)
    prefix = None
    if is_along_prefix:
        prefix = prepare_prefix(
            recipe,
            alignment,
            evidence,
            matches_outputs=_match_outputs(methods),
            collected=() if evidence else tuple(kinds_needed(apart)),
        )
    known = prefix.evidence if prefix else evidence
    num_kept = len(recipe.trajectory)
    plan = make_plan(alignment, rules, dtype, output, known, num_kept, fp8.scaled)
    check_covered(plan, methods)
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
    held = frozenset(name for method in methods for name in method.held_models)
    heads, kept_heads = _match_heads(recipe, alignment, held)
    code += kept_heads
    if heads is not None and recipe.match_heads is None:
        names = dict.fromkeys(n for m in alignment.models for n in m.heads)
        code.append(f"matched to the merged model, on each model's data: {', '.join(names)}")
    code += poor_models(recipe, evidence)
    along = prefix.notes_on(plan) if prefix else ()
    along = [*along, *plan_notes(plan, recipe, alignment, evidence)]
    notes = *inputs.notes, *completed.notes, *alignment.notes, *fp8.notes, *tokenizers.notes
    return PreparedMerge(
        recipe,
        alignment,
        plan,
        evidence,
        output,
        companions,
        notes=(*notes, *unused, *code, *card_notes, *along),
        pretrained=inputs.pretrained,
        prefix=prefix,
        heads=heads,
        head_records=_head_records(recipe, alignment),
        inherited=inherited,
        chat_template=tokenizers.chat_template,
        config_changes={**config_changes, **fp8.config_changes},
        vocabulary=vocabulary,
    )


def _companion_source(inputs: MergeInputs, whole: Checkpoint | None) -> Checkpoint | None:
    """Whose configuration and tokenizer go with the result.

    The base's, or else the first model's; those of a model that others are a part of before all.
    """
    models = list(inputs.models.values())
    first = [whole or inputs.pretrained or inputs.base] if not inputs.writes_adapter else []
    return next((c for c in (*first, *models) if c is not None and c.folder is not None), None)


def _rules_of_view(
    recipe: Recipe, inputs: MergeInputs, rules: Mapping[str, Rule], copied: Mapping[str, str]
) -> dict[str, Rule]:
    """The rules for what is merged: full models, vectors of (IA)^3, or changes of LoRA.

    Parameters in `copied`, which only one model has, are taken from it.
    """
    found = dict(rules)
    for name, model in copied.items():
        if name in found and found[name].method.only_model is None:
            found[name] = replace(found[name], method=Passthrough(model=model))
    if inputs.view == "vectors":
        return {n: replace(rule, method=rule.method.for_vectors()) for n, rule in found.items()}
    if inputs.view == "joint":
        check_joint(recipe, found)
    return found


def _match_outputs(methods: Sequence[Method]) -> bool:
    """Whether methods along the merged model match outputs; all must do the same."""
    found = {method.matches_outputs for method in methods if method.uses_merged_inputs}
    if len(found) > 1:
        raise RecipeError("targets: must be the same of all methods with inputs: merged")
    return found.pop()


def _compare_tokenizers(
    recipe: Recipe, inputs: MergeInputs, output: Path | None
) -> TokenizerComparison:
    """Compare all tokenizers; `output` is the folder whose files go with the result."""
    base = inputs.pretrained or inputs.base
    found = compare_tokenizers(
        {name: model.folder for name, model in inputs.models.items()},
        None if base is None else ("the base", base.folder),
        output,
        ids=recipe.tokenizer is None,
        templates=recipe.chat_template is None,
    )
    if recipe.chat_template is not None:
        folders = [model.folder for model in (*inputs.models.values(), base) if model]
        found.chat_template, said = choose_template(recipe.chat_template, folders, output)
        found.notes += said
    if recipe.ignore_tokenizers:
        ignored = [f"ignored: {problem.partition(';')[0]}" for problem in found.problems]
        return TokenizerComparison([], [*found.notes, *ignored], found.chat_template)
    return found


def _match_heads(
    recipe: Recipe, alignment: Alignment, held: AbstractSet[str]
) -> tuple[HeadMatching | None, Sequence[str]]:
    """The heads to match, checked; nothing where no model has one and it was not asked for.

    Beside it, notes on what of them stays as it is: among others those of models whose own answers
    are not asked for.
    """
    have_heads = [model for model in alignment.models if model.heads]
    if not recipe.matches_heads or (not have_heads and recipe.match_heads is None):
        return None, ()
    if not have_heads:
        raise RecipeError(
            "match_heads: no model has a head of its own; say which parameters are theirs with "
            "heads: / --heads PATTERN, or leave it out"
        )
    asked = [one for one in read_all_data(recipe, alignment) if one.model.heads]
    kept = [
        f"{m.name}: its head is kept, since it is from_init" for m in have_heads if m.name in held
    ]
    matching = HeadMatching(tuple(one for one in asked if one.model.name not in held))
    return (matching if matching.models else None), [*kept, *matching.check()]


def _head_records(recipe: Recipe, alignment: Alignment) -> dict[str, HeadRecord]:
    """What the file of each head will say of it."""
    return {
        model.name: record_head(
            model.checkpoint.folder, None if entry.data is None else entry.data.task_file.labels
        )
        for model, entry in zip(alignment.models, recipe.models, strict=True)
        if model.heads
    }


def _taken_from_one(recipe: Recipe, name: str) -> bool:
    """Whether the recipe takes this parameter from one model as it is."""
    method = recipe.method.name
    for override in recipe.overrides:
        if override.method and matches(name, override.match):
            method = override.method.get("name", method)
    return method == "passthrough"
