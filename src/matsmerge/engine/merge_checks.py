"""What a merge is refused for before anything is read."""

from collections.abc import Iterable, Mapping, Sequence

from matsmerge.engine.merge_inputs import MergeInputs
from matsmerge.engine.plan import Plan
from matsmerge.errors import RecipeError, StatisticsError, closest
from matsmerge.methods.method import Method
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import Rule


def check_start(recipe: Recipe, inputs: MergeInputs) -> None:
    """Refuse methods that need a base where there is none; adapters know theirs."""
    if inputs.base is not None:
        return
    RecipeError.raise_all(
        f"{where}method {spec.name} needs a base model (base: / --base)"
        for where, spec in recipe.method_specs()
        if spec.at_depth(0).reads_base or spec.parameters.get("model") == "base"
    )


def check_modules(inputs: MergeInputs) -> None:
    """Refuse (IA)^3 adapters of different modules, where one model runs with all their vectors."""
    (label, first), *others = ((a.label, set(a.modules)) for a in inputs.adapters.values())
    RecipeError.raise_all(
        f"{other} and {label} scale different modules, such as '{min(first ^ modules)}'; inputs: "
        "merged runs everyone's data in one model, so train adapters of the same modules, or use "
        "inputs: own"
        for other, modules in others
        if modules != first
    )


def check_held(methods: Iterable[Method], models: Sequence[str]) -> None:
    """Refuse names in from_init that no model has."""
    RecipeError.raise_all(
        f"from_init: there is no model '{name}'{closest(name, models)}"
        for name in sorted({name for method in methods for name in method.held_models})
        if name not in models
    )


def check_joint(recipe: Recipe, rules: Mapping[str, Rule]) -> None:
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


def check_covered(plan: Plan, methods: Iterable[Method]) -> None:
    """Refuse objectives that have nothing for any parameter."""
    layers = plan.layers
    StatisticsError.raise_all(
        f"the objective {name} has nothing for any of the parameters to merge; are the statistics "
        "of these models, and were their layers among the collected ones?"
        for name in sorted({n for method in methods for n in method.idle_objectives(layers)})
    )
