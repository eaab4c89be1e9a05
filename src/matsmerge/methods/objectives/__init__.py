"""Objectives: what C_m is. A new one is a class, imported here, and a line in this table."""

from collections.abc import Mapping

from matsmerge.methods.objectives.fisher import BlockFisher, Fisher
from matsmerge.methods.objectives.from_weights import ActMat, CenteredActMat, Tact, Wudi
from matsmerge.methods.objectives.gram import GramObjective
from matsmerge.methods.objectives.identity import IdentityObjective
from matsmerge.methods.objectives.kfac import Kfac, KfacOfScales
from matsmerge.methods.objectives.objective import Objective
from matsmerge.methods.options import by_name

OBJECTIVES: Mapping[str, type[Objective]] = by_name(
    IdentityObjective,
    Fisher,
    GramObjective,
    Kfac,
    KfacOfScales,
    BlockFisher,
    ActMat,
    Wudi,
    Tact,
    CenteredActMat,
)
