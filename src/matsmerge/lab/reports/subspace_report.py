"""The figures of `mats inspect --subspace`: spectra, overlaps and distances, as page or picture."""

from pathlib import Path

from matsmerge.files.output_place import check_file
from matsmerge.files.whole_outputs import put_bytes
from matsmerge.lab.reports import picture
from matsmerge.lab.reports.document import Figure, Report, Section
from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.sections.subspace_figures import (
    distance_figure,
    overlap_figure,
    spectrum_figure,
)
from matsmerge.lab.subspaces.subspace_findings import SubspaceView

_TITLE = "Task parameter subspaces"


def check_figure(target: Path) -> None:
    """Refuse a file that cannot be written or drawn, before any work."""
    check_file(target, ".html", *picture.SUFFIXES, overwrite=True)
    if target.suffix in picture.SUFFIXES:
        picture.check_picture()


def subspace_figures(view: SubspaceView) -> list[Figure]:
    """What there is to see of a view."""
    return [
        spectrum_figure(view),
        *([overlap_figure(view.summary())] if len(view.tasks) > 1 else []),
        *([distance_figure(view)] if view.relative_to is not None else []),
    ]


def write_figure(view: SubspaceView, target: Path) -> None:
    """One figure below the other on a page; side by side in a picture."""
    figures = subspace_figures(view)
    if target.suffix == ".html":
        sections = [Section(figure.title, [figure]) for figure in figures]
        about = f"{', '.join(view.tasks)}, in {len(view.layers)} layers."
        content = to_page(Report(_TITLE, about, sections, kind="Subspaces")).encode()
    else:
        plots = {figure.title: figure.plot for figure in figures}
        content = picture.draw(picture.panels(plots, side_by_side=True), target.suffix)
    put_bytes(target, content)
