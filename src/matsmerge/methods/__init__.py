"""Merging methods, one short file each. A new one is a file, and its class in both lists here."""

from collections.abc import Mapping

from matsmerge.methods.ace import AdaptiveCovariance
from matsmerge.methods.average import Average
from matsmerge.methods.dare import DareLinear, DareTies
from matsmerge.methods.iso_c import IsotropicCommon
from matsmerge.methods.iso_cts import IsotropicCommonAndSpecific
from matsmerge.methods.localize_and_stitch import LocalizeAndStitch
from matsmerge.methods.magmax import MagMax
from matsmerge.methods.mats import Mats
from matsmerge.methods.method import Method
from matsmerge.methods.model_stock import ModelStock
from matsmerge.methods.named import (
    ActMatMerging,
    BlockDiagonalFisher,
    CalibratedMerging,
    CenteredActMatMerging,
    DiagonalFisher,
    EssentialSubspaceMerging,
    FeatureCalibration,
    MatsCross,
    MatsKfac,
    RegMean,
    RegMeanPlusPlus,
    SpectralWudi,
    TactMerging,
    WudiMerging,
)
from matsmerge.methods.options import table
from matsmerge.methods.passthrough import Passthrough
from matsmerge.methods.slerp import Slerp
from matsmerge.methods.task_arithmetic import TaskArithmetic
from matsmerge.methods.ties import Ties
from matsmerge.methods.tsv_m import TaskSingularVectors

__all__ = [
    "METHODS",
    "ActMatMerging",
    "AdaptiveCovariance",
    "Average",
    "BlockDiagonalFisher",
    "CalibratedMerging",
    "CenteredActMatMerging",
    "DareLinear",
    "DareTies",
    "DiagonalFisher",
    "EssentialSubspaceMerging",
    "FeatureCalibration",
    "IsotropicCommon",
    "IsotropicCommonAndSpecific",
    "LocalizeAndStitch",
    "MagMax",
    "Mats",
    "MatsCross",
    "MatsKfac",
    "Method",
    "ModelStock",
    "Passthrough",
    "RegMean",
    "RegMeanPlusPlus",
    "Slerp",
    "SpectralWudi",
    "TactMerging",
    "TaskArithmetic",
    "TaskSingularVectors",
    "Ties",
    "WudiMerging",
]

METHODS: Mapping[str, type[Method]] = table(
    Average,
    TaskArithmetic,
    Ties,
    DareLinear,
    DareTies,
    MagMax,
    LocalizeAndStitch,
    Slerp,
    ModelStock,
    TaskSingularVectors,
    IsotropicCommon,
    IsotropicCommonAndSpecific,
    AdaptiveCovariance,
    Passthrough,
    Mats,
    MatsKfac,
    MatsCross,
    FeatureCalibration,
    DiagonalFisher,
    RegMean,
    RegMeanPlusPlus,
    BlockDiagonalFisher,
    ActMatMerging,
    WudiMerging,
    SpectralWudi,
    TactMerging,
    CenteredActMatMerging,
    CalibratedMerging,
    EssentialSubspaceMerging,
)
