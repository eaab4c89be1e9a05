"""Merging methods, one short file each. A new one is a file and a line in this table."""

from collections.abc import Mapping

from matsmerge.methods.average import Average
from matsmerge.methods.dare import DareLinear, DareTies
from matsmerge.methods.mats import Mats
from matsmerge.methods.method import Method
from matsmerge.methods.model_stock import ModelStock
from matsmerge.methods.named import (
    ActMatMerging,
    BlockDiagonalFisher,
    CenteredActMatMerging,
    DiagonalFisher,
    KroneckerOfSums,
    MatsKfac,
    RegMean,
    RegMeanPlusPlus,
    TactMerging,
    WudiMerging,
)
from matsmerge.methods.passthrough import Passthrough
from matsmerge.methods.slerp import Slerp
from matsmerge.methods.task_arithmetic import TaskArithmetic
from matsmerge.methods.ties import Ties

METHODS: Mapping[str, type[Method]] = {
    "average": Average,
    "task_arithmetic": TaskArithmetic,
    "ties": Ties,
    "dare_linear": DareLinear,
    "dare_ties": DareTies,
    "slerp": Slerp,
    "model_stock": ModelStock,
    "passthrough": Passthrough,
    "mats": Mats,
    "mats_kfac": MatsKfac,
    "diagonal_fisher": DiagonalFisher,
    "regmean": RegMean,
    "regmean++": RegMeanPlusPlus,
    "block_fisher": BlockDiagonalFisher,
    "kronecker_of_sums": KroneckerOfSums,
    "actmat": ActMatMerging,
    "wudi": WudiMerging,
    "tact": TactMerging,
    "centered_actmat": CenteredActMatMerging,
}


def method_name(method: Method) -> str:
    """The name a recipe has for a method."""
    return next(name for name, cls in METHODS.items() if cls is type(method))
