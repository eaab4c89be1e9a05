"""Studies: what a suite finds out, the steps it takes, and the results they become."""

from matsmerge.lab.experiments.studies.cost_study import CostStudy
from matsmerge.lab.experiments.studies.curve_study import CurveStudy
from matsmerge.lab.experiments.studies.landscape_study import LandscapeStudy
from matsmerge.lab.experiments.studies.merge_studies import (
    ComparisonStudy,
    FisherStudy,
    HeatMapStudy,
    IntermediateStudy,
)
from matsmerge.lab.experiments.studies.rank_study import RankStudy
from matsmerge.lab.experiments.studies.study import Study
from matsmerge.lab.experiments.studies.subspace_study import SubspaceStudy
from matsmerge.lab.experiments.suite_parts import SuitePart


class Studies(SuitePart):
    """The studies of a suite by name, as its file has them."""

    heat_map: HeatMapStudy | None = None
    fisher: FisherStudy | None = None
    curves: CurveStudy | None = None
    ranks: RankStudy | None = None
    costs: CostStudy | None = None
    landscape: LandscapeStudy | None = None
    subspaces: SubspaceStudy | None = None
    intermediate: IntermediateStudy | None = None

    def asked(self) -> dict[str, Study]:
        """The studies to do, the comparison of all methods on all tasks first.

        A study of intermediate tasks takes its place.
        """
        given: dict[str, Study] = {name: study for name, study in self if study is not None}
        if "intermediate" in given:
            return {"intermediate": given.pop("intermediate"), **given}
        return {"comparison": ComparisonStudy(), **given}
