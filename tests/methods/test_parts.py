"""Methods and their parts from what recipes say, and back."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from matsmerge.methods import METHODS
from matsmerge.methods.average import Average
from matsmerge.methods.mats import Mats
from matsmerge.methods.method import Method
from matsmerge.methods.named import MatsKfac, RegMean
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.objectives.from_weights import Tact
from matsmerge.methods.objectives.gram import GramObjective
from matsmerge.methods.objectives.kfac import Kfac
from matsmerge.methods.parts import AnyMethod, Stage
from matsmerge.methods.solvers import SOLVERS, ClosedForm, ConjugateGradients
from matsmerge.methods.task_arithmetic import TaskArithmetic
from matsmerge.methods.ties import Ties
from matsmerge.problems import problems_of

METHOD: TypeAdapter[Method] = TypeAdapter(AnyMethod)


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ("average", Average()),
        ({"name": "ties", "density": 0.1}, Ties(density=0.1)),
        ({"name": "mats", "objective": "kfac"}, Mats(objective=Kfac())),
        ({"name": "mats", "objective": {"name": "kfac", "ridge": 1}}, Mats(objective=Kfac(ridge=1))),
        # Options of parts, without saying whose.
        ({"name": "mats", "iterations": 7}, Mats(solver=ConjugateGradients(iterations=7))),
        ({"name": "mats", "init": "ties", "density": 0.1}, Mats(init=Ties(density=0.1))),
        ({"name": "mats", "objective": "tact", "density": 0.1, "scale": 0.5},
         Mats(objective=Tact(density=0.1), init=TaskArithmetic(scale=0.5))),
        ({"name": "mats", "scale": 0.5}, Mats(init=TaskArithmetic(scale=0.5))),
        # What is named as the default is keeps its options; anything else has none of them.
        ({"name": "mats_kfac", "objective": {"name": "kfac"}}, MatsKfac()),
        ({"name": "mats_kfac", "objective": "kfac", "bias": False},
         MatsKfac(objective=Kfac(bias=False, equalize=True, ridge=0.03))),
        ({"name": "mats_kfac", "solver": {"iterations": 3}},
         MatsKfac(solver=ConjugateGradients(preconditioner="kronecker", iterations=3))),
        ({"name": "mats_kfac", "objective": "gram"}, MatsKfac(objective=GramObjective())),
        ({"name": "mats", "init": None, "objective": {}}, Mats()),
        # An init is any method, and may have an init itself.
        ({"name": "mats", "init": {"name": "regmean", "off_diagonal": 0.5}},
         Mats(init=RegMean(objective=GramObjective(off_diagonal=0.5)))),
        ({"name": "mats", "init": {"name": "mats", "init": "ties", "solver": "closed_form"}},
         Mats(init=Mats(init=Ties(), solver=ClosedForm()))),
        ({"name": "mats", "stages": [{"iterations": 3}, {"objective": "kfac", "bias": True}]},
         Mats(stages=(Stage(solver=ConjugateGradients(iterations=3)),
                      Stage(objective=Kfac(bias=True))))),
        (Ties(), Ties()),
    ],
)  # fmt: skip
def test_what_recipes_say(data: Any, method: Method) -> None:
    made = METHOD.validate_python(data)
    assert made == method
    assert METHOD.validate_python(made.written()) == method
    # What was not said is not said again: whether an objective was chosen makes a difference.
    assert METHOD.validate_python(made.written()).model_fields_set >= made.model_fields_set
    dumped = made.model_dump(mode="json")
    assert dumped["name"] == method.name


def test_parts_that_are_objects_have_only_what_they_say() -> None:
    method = MatsKfac(objective=Kfac(), solver=ConjugateGradients())
    assert METHOD.validate_python(method.written()) == method
    assert METHOD.validate_python(method.written()) != MatsKfac()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("tise", "unknown method 'tise'; did you mean 'ties'?"),
        ({"density": 1}, "name: is required"),
        ({"name": "ties", "densty": 1}, "ties: unknown parameter 'densty'; did you mean 'density'?"),
        ({"name": "mats", "init": "tise"}, "mats.init: unknown init 'tise'; did you mean 'ties'?"),
        ({"name": "mats", "objective": {"name": "kfac", "ridg": 1}},
         "mats.objective.kfac: unknown parameter 'ridg'; did you mean 'ridge'?"),
        ({"name": "mats", "itrations": 1},
         "mats: unknown parameter 'itrations'; did you mean 'iterations'?"),
        ({"name": "mats", "per": "token"},
         "mats: unknown parameter 'per': it belongs to the objective kfac"),
        ({"name": "mats", "stages": [{"per": "token"}]},
         "mats.stages.0: unknown parameter 'per': it belongs to the objective kfac"),
        ({"name": "mats", "stages": [{"init": "ties"}]},
         "mats.stages.0: unknown parameter 'init'"),
        ({"name": "mats", "iterations": -1},
         "mats.solver.cg.iterations: input should be greater than or equal to 0, found -1"),
        ({"name": "mats", "init": {"name": "mats", "init": {"name": "ties", "density": 7}}},
         "mats.init.mats.init.ties.density: input should be less than or equal to 1, found 7"),
        ({"name": "mats", "objective": 3}, "mats.objective: unknown objective '3'"),
        ({"name": "mats", "objective": ["gram"]}, "several rounds are stages"),
        ({"name": "ties", "scale": [0.1]}, "ties.scale: input should be a valid number"),
    ],
)  # fmt: skip
def test_what_is_wrong(data: Any, problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        METHOD.validate_python(data)
    assert problem in "\n".join(problems_of(error.value, *METHODS.values()))


def test_an_object_has_the_name_of_its_class() -> None:
    assert Ties.model_validate({"name": "ties"}) == Ties()
    with pytest.raises(ValidationError, match="the name is ties, found 'average'"):
        Ties.model_validate({"name": "average"})


def test_numbers_over_depth() -> None:
    data = {
        "name": "mats",
        "init": {"name": "ties", "scale": [0, 1]},
        "objective": {"name": "gram", "ridge": [0.1, 0.3]},
        "tolerance": [0, 0, 0.5],
    }
    made = METHOD.validate_python(data, context={"depth": 0.75})
    assert isinstance(made, Mats)
    assert made.model_dump()["init"]["scale"] == 0.75
    assert made.model_dump()["objective"]["ridge"] == pytest.approx(0.25)
    assert made.model_dump()["solver"]["tolerance"] == pytest.approx(0.25)
    for key, wrong in (("density", [0.5, 2]), ("trim", ["global"]), ("scale", []), ("scale", "x")):
        with pytest.raises(ValidationError):
            METHOD.validate_python({"name": "ties", key: wrong}, context={"depth": 0.0})


@pytest.mark.parametrize("table", [METHODS, OBJECTIVES, SOLVERS])
def test_tables(table: dict[str, Any]) -> None:
    for name, cls in table.items():
        assert cls.name == name
        assert cls.__doc__
        assert all(field.description for field in cls.model_fields.values()), name


def test_what_plans_call_them() -> None:
    """A name as recipes have it, and the options that are not as they are by default."""
    assert Average().summary == "average"
    assert TaskArithmetic(scale=0.5).summary == "task_arithmetic(scale=0.5)"
    solved = Mats(init=TaskArithmetic(scale=0.5), objective=Tact(density=0.1)).summary
    assert solved.startswith("task_arithmetic(scale=0.5), then tact(density=0.1) by cg")
