"""Merging methods, one short file each. A new one is a file, and its class in both lists here."""

from collections.abc import Mapping

from matsmerge.methods.ace import AdaptiveCovariance
from matsmerge.methods.arcee_fusion import ArceeFusion
from matsmerge.methods.average import Average, Linear
from matsmerge.methods.breadcrumbs import Breadcrumbs, BreadcrumbsTies
from matsmerge.methods.dare import DareLinear, DareTies
from matsmerge.methods.della import Della, DellaLinear
from matsmerge.methods.iso_c import IsotropicCommon
from matsmerge.methods.iso_cts import IsotropicCommonAndSpecific
from matsmerge.methods.karcher import KarcherMean
from matsmerge.methods.localize_and_stitch import LocalizeAndStitch
from matsmerge.methods.magmax import MagMax
from matsmerge.methods.magnitude_prune import MagnitudePrune
from matsmerge.methods.mats import Mats
from matsmerge.methods.method import Method
from matsmerge.methods.model_stock import ModelStock
from matsmerge.methods.multislerp import MultiSlerp
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
from matsmerge.methods.nearswap import NearSwap
from matsmerge.methods.nuslerp import NuSlerp
from matsmerge.methods.options import by_name
from matsmerge.methods.passthrough import Passthrough
from matsmerge.methods.polarize_layers import PolarizeLayers
from matsmerge.methods.ram import RamPlus, ReinforcedAgentMerging
from matsmerge.methods.sce import Sce
from matsmerge.methods.slerp import Slerp
from matsmerge.methods.task_arithmetic import TaskArithmetic
from matsmerge.methods.ties import Ties
from matsmerge.methods.tsv_m import TaskSingularVectors

__all__ = [
    "METHODS",
    "ActMatMerging",
    "AdaptiveCovariance",
    "ArceeFusion",
    "Average",
    "BlockDiagonalFisher",
    "Breadcrumbs",
    "BreadcrumbsTies",
    "CalibratedMerging",
    "CenteredActMatMerging",
    "DareLinear",
    "DareTies",
    "Della",
    "DellaLinear",
    "DiagonalFisher",
    "EssentialSubspaceMerging",
    "FeatureCalibration",
    "IsotropicCommon",
    "IsotropicCommonAndSpecific",
    "KarcherMean",
    "Linear",
    "LocalizeAndStitch",
    "MagMax",
    "MagnitudePrune",
    "Mats",
    "MatsCross",
    "MatsKfac",
    "Method",
    "ModelStock",
    "MultiSlerp",
    "NearSwap",
    "NuSlerp",
    "Passthrough",
    "PolarizeLayers",
    "RamPlus",
    "RegMean",
    "RegMeanPlusPlus",
    "ReinforcedAgentMerging",
    "Sce",
    "Slerp",
    "SpectralWudi",
    "TactMerging",
    "TaskArithmetic",
    "TaskSingularVectors",
    "Ties",
    "WudiMerging",
]

METHODS: Mapping[str, type[Method]] = by_name(
    Average,
    TaskArithmetic,
    Ties,
    DareLinear,
    DareTies,
    Breadcrumbs,
    BreadcrumbsTies,
    Della,
    DellaLinear,
    MagnitudePrune,
    Sce,
    ReinforcedAgentMerging,
    RamPlus,
    MagMax,
    LocalizeAndStitch,
    Slerp,
    NuSlerp,
    MultiSlerp,
    KarcherMean,
    NearSwap,
    ArceeFusion,
    ModelStock,
    TaskSingularVectors,
    IsotropicCommon,
    IsotropicCommonAndSpecific,
    AdaptiveCovariance,
    Linear,
    Passthrough,
    PolarizeLayers,
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
