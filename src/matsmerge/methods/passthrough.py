"""Taking a parameter from one model as it is."""

from collections.abc import Iterable

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Site


class Passthrough(Method):
    """theta = scale * theta_m for one model m; for stacks, and in overrides."""

    name = "passthrough"

    model: str | None = Field(
        None, description="the name of the model to take it from, or 'base'; by default the only"
    )
    scale: float = Field(1.0, description="factor on the model's values")

    @property
    def only_model(self) -> str | None:
        return self.model

    def refusals(self, num_models: int) -> Iterable[str]:
        if self.model is None and num_models > 1:
            yield f"takes one model, and {num_models} take part; say which with model: NAME"

    def merge(self, site: Site) -> Tensor:
        if self.model == "base":
            values = site.load_base()
        else:
            task = next(t for t in site.tasks if self.model in (None, t.model))
            values = task.load()
        return values if self.scale == 1 else values.mul_(self.scale)
