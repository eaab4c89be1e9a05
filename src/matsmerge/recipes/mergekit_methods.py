"""mergekit's methods: their parameters, what it assumes where none is given, and ours for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from matsmerge.errors import RecipeError, closest
from matsmerge.methods import METHODS
from matsmerge.methods.method import Method

REQUIRED = object()  # a parameter that must be given


@dataclass(frozen=True)
class MergekitMethod:
    """The parameters of a method with their defaults: those of the merge, and of each model.

    `base`: whether it needs one, has a use for one, or counts it as a model like others.
    `may_add_nothing`: whether the base alone is a merge, too.
    """

    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    base: Literal["required", "optional", "ignored"] = "required"
    may_add_nothing: bool = False


def _sparse(normalize: bool, rescale: bool, **own: Any) -> MergekitMethod:
    """Task arithmetic on task vectors of which some entries are dropped."""
    shared = {"normalize": normalize, "rescale": rescale, "lambda": 1.0, "int8_mask": False}
    own = {"weight": REQUIRED, "density": 1.0, **own}
    return MergekitMethod(shared, own, may_add_nothing=True)


_WEIGHT = {"weight": REQUIRED}
MERGEKIT_METHODS: Mapping[str, MergekitMethod] = {
    "linear": MergekitMethod({"normalize": True}, _WEIGHT, "ignored"),
    "task_arithmetic": _sparse(normalize=False, rescale=False),
    "ties": _sparse(normalize=True, rescale=False),
    "dare_ties": _sparse(normalize=False, rescale=True),
    "dare_linear": _sparse(normalize=False, rescale=True),
    "breadcrumbs": _sparse(normalize=False, rescale=False, gamma=0.01),
    "breadcrumbs_ties": _sparse(normalize=False, rescale=False, gamma=0.01),
    "della": _sparse(normalize=True, rescale=True, epsilon=0.15),
    "della_linear": _sparse(normalize=False, rescale=True, epsilon=0.15),
    "slerp": MergekitMethod({"t": REQUIRED}),
    "nuslerp": MergekitMethod(
        {"nuslerp_row_wise": False, "nuslerp_flatten": True}, _WEIGHT, "optional"
    ),
    "multislerp": MergekitMethod({"normalize_weights": True, "eps": 1e-8}, _WEIGHT, "optional"),
    "karcher": MergekitMethod({"max_iter": 10, "tol": 1e-5}, {}, "ignored"),
    "model_stock": MergekitMethod({"filter_wise": False}),
    "nearswap": MergekitMethod({"t": REQUIRED}),
    "arcee_fusion": MergekitMethod(),
    "sce": MergekitMethod({"select_topk": 1.0, "int8_mask": False}, may_add_nothing=True),
    "ram": MergekitMethod({"epsilon": 1e-5}, may_add_nothing=True),
    "ramplus_tl": MergekitMethod({"r": 0.1, "alpha": 0.2, "epsilon": 1e-5}, may_add_nothing=True),
    "passthrough": MergekitMethod({}, {"scale": 1.0}, "ignored"),
}
PARAMETERS = {key for one in MERGEKIT_METHODS.values() for key in (*one.shared, *one.own)}
# What a method of ours is told besides, to do what mergekit's does.
_ALSO: Mapping[str, Mapping[str, Any]] = {"ties": {"trim": "parameter"}}
# mergekit's names of methods and parameters, where ours may differ.
_OUR_METHODS = {"linear": "average"}
_OUR_NAMES = {"lambda": "scale", "normalize_weights": "normalize", "max_iter": "iterations"}
# They change how mergekit computes, and not what.
NEEDLESS = ("int8_mask", "eps")
# Accepted by mergekit, and used for nothing.
_UNUSED = {"task_arithmetic": ("density", "rescale")}


def find_method(kind: Any) -> tuple[MergekitMethod, type[Method]]:
    """A method by mergekit's name: its parameters, and our class; one of ours has its own."""
    name = str(kind)
    ours = METHODS.get(name) or METHODS.get(_OUR_METHODS.get(name, ""))
    if ours is None:
        there = [n for n in MERGEKIT_METHODS if n in METHODS or n in _OUR_METHODS]
        raise RecipeError(f"the merge_method '{name}' is not supported{closest(name, there)}")
    if name in MERGEKIT_METHODS:
        return MERGEKIT_METHODS[name], ours
    shared = {key: f.get_default() for key, f in ours.model_fields.items()}
    own = {"weight": 1.0, "density": shared.pop("density", None)}
    return MergekitMethod(shared, own, "required" if ours.needs_base else "optional"), ours


def our_name(ours: type[Method], key: str) -> str | None:
    """What our method calls a parameter of mergekit's; None if it has none like it."""
    short = key.removeprefix(f"{ours.name}_")
    return next((n for n in (key, _OUR_NAMES.get(key), short) if n in ours.model_fields), None)


def added_options(ours: type[Method]) -> dict[str, Any]:
    """Options that make our method do what mergekit's does."""
    return dict(_ALSO.get(ours.name, {}))


def is_unused(kind: str, key: str) -> bool:
    """Whether a parameter changes nothing of what mergekit's method gives."""
    return key in NEEDLESS or key in _UNUSED.get(kind, ())
