"""Taking a parameter from one model as it is."""

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Site


class Passthrough(Method):
    """theta = theta_m for one chosen model m; most useful in an override."""

    name = "passthrough"

    model: str = Field(description="the name of the model to take it from, or 'base'")

    @property
    def only_model(self) -> str:
        return self.model

    def merge(self, site: Site) -> Tensor:
        if self.model == "base":
            return site.load_base()
        return next(task for task in site.tasks if task.model == self.model).load()
