"""Objectives: what C_m is. A new one is a class and a line in this table."""

from collections.abc import Mapping

from matsmerge.methods.objectives.fisher import BlockFisher, Fisher
from matsmerge.methods.objectives.from_weights import ActMat, CenteredActMat, Tact, Wudi
from matsmerge.methods.objectives.gram import Gram
from matsmerge.methods.objectives.identity import Identity
from matsmerge.methods.objectives.kfac import Kfac
from matsmerge.methods.objectives.objective import Objective

OBJECTIVES: Mapping[str, type[Objective]] = {
    "identity": Identity,
    "fisher": Fisher,
    "gram": Gram,
    "kfac": Kfac,
    "block_fisher": BlockFisher,
    "actmat": ActMat,
    "wudi": Wudi,
    "tact": Tact,
    "centered_actmat": CenteredActMat,
}
