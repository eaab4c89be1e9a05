"""Methods that are MaTS with other defaults, under the names their papers gave them."""

from matsmerge.methods.average import Average
from matsmerge.methods.mats import Inputs, Mats, Otherwise, Targets
from matsmerge.methods.merge_steps import EssentialSubspaces, SingularValueCalibration
from matsmerge.methods.objectives.fisher import Fisher
from matsmerge.methods.objectives.from_weights import ActMat, CenteredActMat, Tact, Wudi
from matsmerge.methods.objectives.gram import GramObjective
from matsmerge.methods.objectives.identity import IdentityObjective
from matsmerge.methods.objectives.kfac import Kfac
from matsmerge.methods.parts import InitPart, ObjectivePart, SolverPart
from matsmerge.methods.solvers import ClosedForm, ConjugateGradients, SpectralFilter
from matsmerge.methods.task_arithmetic import TaskArithmetic
from matsmerge.methods.tsv_m import TaskSingularVectors


class DiagonalFisher(Mats):
    """Diagonal Fisher merging: each parameter by its own Fisher information.

    theta = sum_m F_m theta_m / sum_m F_m (Matena & Raffel, 2022).
    """

    name = "diagonal_fisher"
    chooses_for_adapters = False

    init: InitPart = Average()
    objective: ObjectivePart = Fisher()
    solver: SolverPart = ClosedForm()


class RegMean(Mats):
    """RegMean: match every linear layer's outputs on each model's data, in closed form.

    W = (sum_m W_m G_m) (sum_m G_m)^-1, what is off the diagonal of G_m scaled (Jin et al., 2023).
    """

    name = "regmean"
    chooses_for_adapters = False

    init: InitPart = Average()
    objective: ObjectivePart = GramObjective(off_diagonal=0.9)
    solver: SolverPart = ClosedForm()


class RegMeanPlusPlus(RegMean):
    """RegMean++: RegMean with the inputs that layers get in the merged model.

    Blocks are merged one after the other, on what those before them make of each model's data
    (Nguyen et al., 2025, arXiv:2508.03121). Needs the data.
    """

    name = "regmean++"

    inputs: Inputs = "merged"
    targets: Targets = "weights"


class FeatureCalibration(Mats):
    """Every layer outputs what each model's does for the same example, layer after layer.

    sum_m X E[z zᵀ] + λ X = sum_m W_m E[z* zᵀ] + λ A, z what the layer receives in the merged model
    and z* in model m, A the init: cross moments, as in FeatCal (2026). Needs data, no labels.
    """

    name = "featcal"
    chooses_for_adapters = False

    objective: ObjectivePart = GramObjective(bias=True, equalize=True, anchor=0.02)
    solver: SolverPart = ClosedForm()
    inputs: Inputs = "merged"


class MatsCross(Mats):
    """The recommended method where there is data: cross moments in K-FAC's metric of outputs.

    sum_m O_m X E[z zᵀ] + λ X = sum_m O_m W_m E[z* zᵀ] + λ A: as `featcal`, but errors of a layer
    count more if they change what model m answers. The ridge on O keeps all others from being free:
    that metric holds for small errors, and what it neglects adds up from layer to layer. A is the
    average, which of one model, or of equal ones, is that model: they stay what they are.
    """

    name = "mats_cross"
    chooses_for_adapters = False

    init: InitPart = Average()
    objective: ObjectivePart = Kfac(bias=True, equalize=True, output_ridge=3, anchor=0.02)
    solver: SolverPart = ConjugateGradients(preconditioner="kronecker", iterations=10)
    inputs: Inputs = "merged"

    @property
    def matches_heads(self) -> bool:
        return True


class MatsKfac(Mats):
    """The recommended method: K-FAC, biases joined, with the Kronecker preconditioner.

    Ten iterations reach what plain conjugate gradients need hundreds for. All models count the
    same in a layer: the Fisher information of one that is sure of its answers is small. The ridge
    averages what hardly matters to any model.
    """

    name = "mats_kfac"
    chooses_for_adapters = False

    objective: ObjectivePart = Kfac(bias=True, equalize=True, ridge=0.03)
    solver: SolverPart = ConjugateGradients(preconditioner="kronecker", iterations=10)


class BlockDiagonalFisher(Mats):
    """Block-diagonal Fisher merging as in the paper: K-FAC, exact blocks for (IA)^3, plain CG."""

    name = "block_fisher"

    objective: ObjectivePart = Kfac()
    solver: SolverPart = ConjugateGradients(iterations=100)


class _MatsFromWeights(Mats):
    chooses_for_adapters = False

    init: InitPart = TaskArithmetic(scale=0.3)
    solver: SolverPart = ConjugateGradients(iterations=100)


class ActMatMerging(_MatsFromWeights):
    """ACTMat: covariances made from the task vectors, no data."""

    name = "actmat"

    objective: ObjectivePart = ActMat()


class WudiMerging(_MatsFromWeights):
    """WUDI: covariances made from the task vectors, each of size one; no data."""

    name = "wudi"

    objective: ObjectivePart = Wudi()


class SpectralWudi(WudiMerging):
    """SWUDI: WUDI's system, solved in its leading directions from the sum of the task vectors.

    Wei et al., 2026 (arXiv:2606.07289). No data.
    """

    name = "swudi"

    init: InitPart = TaskArithmetic(scale=1.0)
    solver: SolverPart = SpectralFilter()


class TactMerging(_MatsFromWeights):
    """TACT: covariances made from trimmed task vectors, no data."""

    name = "tact"

    objective: ObjectivePart = Tact()


class CenteredActMatMerging(_MatsFromWeights):
    """Covariances made from centred task vectors with a ridge, in closed form; no data."""

    name = "centered_actmat"

    init: InitPart = Average()
    objective: ObjectivePart = CenteredActMat()
    solver: SolverPart = ClosedForm()


class CalibratedMerging(Mats):
    """SVC: what any method merges, with the singular values of its changes calibrated; no data.

    Directions that several models share add up in a sum of changes and drown those of single
    models (Li et al., 2026, arXiv:2602.05536).
    """

    name = "svc"
    chooses_for_adapters = False

    objective: ObjectivePart = IdentityObjective()
    solver: SolverPart = SingularValueCalibration()
    otherwise: Otherwise = "init"


class EssentialSubspaceMerging(Mats):
    """Changes made orthogonal to each other in the directions in which they show on data.

    As TSV-M, which all other weights get, with principal components of Δ_m's outputs in the place
    of singular vectors: what ESM (Li et al., 2026, arXiv:2606.19164) does with each weight alone.
    """

    name = "essential_subspaces"
    chooses_for_adapters = False

    init: InitPart = TaskSingularVectors()
    objective: ObjectivePart = GramObjective()
    solver: SolverPart = EssentialSubspaces()
    otherwise: Otherwise = "init"
