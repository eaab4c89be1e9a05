"""Classes: their numbers, and the names that data may use for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from matsmerge.data.row_problems import describe, quote
from matsmerge.data.row_values import is_whole_number
from matsmerge.errors import DataError, closest


class Labels:
    """The classes of a model; a label in data is a class's number or its name."""

    def __init__(self, num_classes: int, numbers: Mapping[str, int]) -> None:
        self.num_classes = num_classes
        self._numbers = numbers

    @classmethod
    def of_model(cls, model: nn.Module, names: Sequence[str] | None) -> "Labels":
        """The classes a model's configuration lists, or those with other names."""
        config: Any = model.config
        num_classes = int(config.num_labels)
        if num_classes < 2 or getattr(config, "problem_type", None) in (
            "regression",
            "multi_label_classification",
        ):
            raise DataError(
                f"the model has {num_classes} outputs and the problem type "
                f"'{getattr(config, 'problem_type', None)}'; expected one that chooses one of "
                "several classes (regression and several labels at once are not supported)"
            )
        if names is None:
            return cls(num_classes, {str(k): int(v) for k, v in (config.label2id or {}).items()})
        if len(set(names)) != num_classes or len(names) != num_classes:
            raise DataError(
                f"expected {num_classes} different names of classes, as the model has outputs, "
                f"found {len(names)}: {', '.join(names)}"
            )
        own = {str(k): int(v) for k, v in (config.label2id or {}).items()}
        if own.keys() == set(names) and any(own[name] != n for n, name in enumerate(names)):
            order = ", ".join(sorted(own, key=lambda name: own[name]))
            raise DataError(
                f"labels: the model has the same classes in another order, {order}; give them in "
                "that order, or leave them out"
            )
        return cls(num_classes, {name: number for number, name in enumerate(names)})

    def number(self, value: object) -> int:
        """The class that a label in data stands for."""
        if isinstance(value, str) and value in self._numbers:
            return self._in_range(self._numbers[value])
        if isinstance(value, str) and not is_whole_number(value):
            raise DataError(
                f"label {quote(value)} is no class of the model{closest(value, self._numbers)}"
            )
        return self._in_range(whole_number(value, self.num_classes, "name"))

    def _in_range(self, number: int) -> int:
        if not 0 <= number < self.num_classes:
            raise DataError(
                f"label {number} is out of range; the model has {self.num_classes} classes, "
                f"0 to {self.num_classes - 1}"
            )
        return number


def whole_number(label: Any, num: int, otherwise: str) -> int:
    """A label as a number; files without types write it as text, arrays hold it in types."""
    plain = int(label) if isinstance(label, str) else label
    plain = plain.item() if hasattr(plain, "item") else plain
    if not isinstance(plain, int):
        raise DataError(
            f"expected a label from 0 to {num - 1} or a {otherwise}, found {describe(plain)}"
        )
    return int(plain)
