"""Taking a parameter from one model as it is."""

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measured, Method, Site


class Passthrough(Method):
    """theta = theta_m for one chosen model m; most useful in an override."""

    model: str = Field(description="the name of the model to take it from, or 'base'")

    def merge(self, site: Site, measured: Measured) -> Tensor:  # noqa: ARG002
        if self.model == "base":
            return site.load_base()
        return next(task for task in site.tasks if task.model == self.model).load()
