"""Classes: their numbers, and the names that data may use for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from matsmerge.data.row_problems import describe_value, quote
from matsmerge.errors import DataError, closest


@dataclass(frozen=True)
class Labels:
    """What labels in data stand for: the classes of a model, or choices, by number or name."""

    num: int
    numbers: Mapping[str, int]  # by name
    what: str = "class of the model"  # one of them

    @classmethod
    def of_model(cls, model: nn.Module, names: Sequence[str] | None) -> "Labels":
        """The classes a model's configuration lists, or those with other names."""
        config: Any = model.config
        num_classes, problem = int(config.num_labels), getattr(config, "problem_type", None)
        if num_classes < 2 or problem in ("regression", "multi_label_classification"):
            raise DataError(
                f"the model has {num_classes} outputs and the problem type '{problem}'; expected "
                "one that chooses one of several classes (regression and several labels at once "
                "are not supported)"
            )
        own = {str(name): int(number) for name, number in (config.label2id or {}).items()}
        if names is None:
            return cls(num_classes, own)
        if len(set(names)) != num_classes or len(names) != num_classes:
            raise DataError(
                f"expected {num_classes} different names of classes, as the model has outputs, "
                f"found {len(names)}: {', '.join(names)}"
            )
        given = {name: number for number, name in enumerate(names)}
        if own.keys() == given.keys() and own != given:
            order = ", ".join(sorted(own, key=lambda name: own[name]))
            raise DataError(
                f"labels: the model has the same classes in another order, {order}; give them in "
                "that order, or leave them out"
            )
        return cls(num_classes, given)

    def number(self, value: Any) -> int:
        """Which one a label in data stands for; files without types write numbers as text."""
        if isinstance(value, str):
            digits = value.strip().removeprefix("-")
            if value not in self.numbers and not (digits.isdecimal() and len(digits) < 20):
                near = closest(value, self.numbers)
                raise DataError(f"label {quote(value)} is no {self.what}{near}")
            value = self.numbers[value] if value in self.numbers else int(value)
        number = value.item() if hasattr(value, "item") else value  # arrays hold it in types
        if not isinstance(number, int):
            raise DataError(
                f"expected a label from 0 to {self.num - 1} or the name of a {self.what}, "
                f"found {describe_value(number)}"
            )
        if not 0 <= number < self.num:
            raise DataError(
                f"label {number} is out of range; expected a {self.what} from 0 to {self.num - 1}"
            )
        return int(number)
