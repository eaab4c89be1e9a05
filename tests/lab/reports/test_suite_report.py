"""Reports of suites: what is in them, what is not, and that text stays text."""

import math
import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from textwrap import dedent
from typing import Any

import pytest
from made_up_results import MEANS, TASKS, make_results, make_subspaces, make_variant

from matsmerge.lab.experiments.suite_results import (
    Intermediate,
    Row,
    Scores,
    SuiteResults,
    VariantResults,
)
from matsmerge.lab.reports.document import Cell, Figure, Paragraph, Report, Table
from matsmerge.lab.reports.markdown import to_markdown
from matsmerge.lab.reports.numbers import signed
from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.sections.donor_scores import donor_scores
from matsmerge.lab.reports.sections.level_sets import level_sets
from matsmerge.lab.reports.sections.rank_curves import rank_curves
from matsmerge.lab.reports.sections.subspace_figures import overlap_blocks
from matsmerge.lab.reports.suite_report import suite_report
from matsmerge.lab.reports.variant import Variant

EVIL = "<img src=x onerror=alert(1)></script>|*bold* `code`"


def titles(report: Report) -> list[str]:
    return [section.title for section in report.shown]


def tables(report: Report, section: str) -> list[Table]:
    blocks = next(s.blocks for s in report.shown if s.title == section)
    return [block for block in blocks if isinstance(block, Table)]


def figure(report: Report, title: str) -> Figure:
    blocks = (block for section in report.shown for block in section.blocks)
    return next(b for b in blocks if isinstance(b, Figure) and b.title == title)


def scores_of(results: SuiteResults, method: str) -> list[float]:
    return [100 * r.test.mean for r in results.variants["full"].comparison if r.method == method]


def test_every_part_has_its_section() -> None:
    assert titles(suite_report(make_results())) == [
        "What was merged", "Scores", "Init and objective", "Fisher information", "Iterations",
        "Rank of statistics", "Convergence of layers", "Cost", "Level sets", "Subspaces", "Intermediate tasks",
        "Left to otherwise", "Recipes", "Provenance",
    ]  # fmt: skip


def test_scores_by_rank_and_by_size() -> None:
    results = make_results(seeds=2)
    shown = figure(suite_report(results), "Accuracy against the rank of statistics")
    by_rank, by_size = shown.plot.data
    assert list(by_rank.x) == ["4", "16", "64", "full"]
    assert list(by_rank.y) == list(by_size.y) == pytest.approx([80.0, 88.0, 89.6, 89.7])
    assert list(by_size.x) == [10**6, 3 * 10**6, 10**7, 10**8]
    assert shown.caption.startswith(
        "mats_kfac of rank 64 is 0.1 points from whole statistics, with 10 % of their bytes. "
    )
    assert [row[:3] for row in shown.table.rows][::3] == [
        ["mats_kfac", "4", "1 MB"], ["mats_kfac", "full", "100 MB"]
    ]  # fmt: skip


def test_ranks_of_a_suite_that_is_not_finished() -> None:
    whole = make_variant(random.Random(0), 1)
    some = whole.model_copy(update={"ranks": whole.ranks[2:0:-1]})
    (shown,) = rank_curves(Variant(some, "full", str))
    assert isinstance(shown, Figure)
    assert list(shown.plot.data[0].x) == ["16", "64"]
    assert shown.caption.startswith("Mean test scores")
    assert rank_curves(Variant(whole.model_copy(update={"ranks": []}), "full", str)) == []


def test_the_figure_that_contributors_are_shown() -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(dedent(code), "CONTRIBUTING.md", "exec"), names)
    results = make_results(seeds=3)
    (shown,) = names["seed_spread"](Variant(results.variants["full"], "full", str))
    (bars,) = shown.plot.data
    spread = dict(zip(bars.y, bars.x, strict=True))
    ours = scores_of(results, "ties")
    assert spread["ties"] == pytest.approx(max(ours) - min(ours))
    alone = make_results(seeds=1).variants["full"]
    assert names["seed_spread"](Variant(alone, "full", str)) == []


def test_scores_are_means_with_errors_over_seeds() -> None:
    results = make_results(seeds=3)
    table = tables(suite_report(results), "Scores")[0]
    assert table.heads[:3] == ["", "mean", "paper's mean"]
    assert [row[0] for row in table.rows][:3] == ["mats_kfac", "mats (Gram)", "regmean"]
    assert [row[0] for row in table.rows][-4:] == ["individual", "joint", "ensemble", "base"]
    found = scores_of(results, "mats_kfac")
    cell = table.rows[0][1]
    assert isinstance(cell, Cell)
    assert cell.text == f"{fmean(found):.1f}"
    assert cell.error == f"{stdev(found) / 3**0.5:.1f}"
    assert cell.best
    assert not any(isinstance(c, Cell) and c.best for c in table.rows[-4])  # individual is no merge
    papers = table.rows[1][2]
    assert isinstance(papers, Cell)
    assert (papers.text, papers.papers) == ("81.5", True)


def test_of_one_seed_errors_are_over_examples() -> None:
    table = tables(suite_report(make_results(seeds=1)), "Scores")[0]
    mean, task = table.rows[0][1], table.rows[0][3]
    assert isinstance(mean, Cell)
    assert isinstance(task, Cell)
    assert task.error == "1.5"
    assert mean.error == f"{1.5 / len(TASKS) ** 0.5:.1f}"


def test_key_figures() -> None:
    results = make_results()
    shown = {k.label: k.value for k in suite_report(results).key_figures}
    best, average, own = (
        fmean(scores_of(results, m)) for m in ("mats_kfac", "average", "individual")
    )
    assert shown["best merge"].startswith(f"{best:.1f} ±")
    assert shown["gap closed"] == f"{(best - average) / (own - average):.0%}"
    two = suite_report(make_results(variants=("full", "ia3"), paper=False)).key_figures
    assert [k.label for k in two] == [
        "best merge, full", "gap closed, full", "best merge, ia3", "gap closed, ia3",
    ]  # fmt: skip


def test_heat_map_holds_scores_and_gains() -> None:
    results = make_results()
    cells = results.variants["full"].heat_map
    drawn = figure(suite_report(results), "Every objective from every init")
    heat = drawn.plot.data[0]
    mine = [c for c in cells if (c.init, c.objective) == ("ties", "kfac")]
    gain = 100 * (fmean(c.score for c in mine) - MEANS["ties"])
    assert heat["z"][2][3] == pytest.approx(gain)
    assert f"{100 * fmean(c.score for c in mine):.1f}" in heat["text"][2][3]
    assert heat["zmin"] == -heat["zmax"]


def test_the_paper_stands_beside_ours_only_where_the_suite_says_so() -> None:
    markdown = to_markdown(suite_report(make_results(paper=False)))
    assert "paper" not in markdown.replace("the paper's formulas", "")
    changed = make_results()
    changed.suite["paper"] = {"full": "t0-8/full"}
    report = suite_report(changed)
    heads = tables(report, "Fisher information")[0].heads
    assert "block_fisher, paper's" in heads
    assert "76.1" in to_markdown(report)
    assert "1.2×10¹⁴" in to_markdown(report)


def test_an_overlap_that_is_not_defined_is_left_empty() -> None:
    found = make_subspaces(random.Random(0))
    found["overlap"][0][1] = found["overlap"][1][0] = math.nan
    drawn, *_ = overlap_blocks(found)
    assert isinstance(drawn, Figure)
    assert drawn.plot.data[0]["z"][0][1] is None
    assert drawn.table.rows[0][2] == "–"


def test_an_unfinished_suite_names_what_is_missing() -> None:
    results = make_results(variants=(), missing=["train wsc, seed 2", EVIL])
    report = suite_report(results)
    assert titles(report) == ["What was merged", "Provenance"]
    assert "train wsc, seed 2" in to_page(report)
    assert "train wsc, seed 2" in to_markdown(report)
    part = VariantResults(
        comparison=[Row(method="average", seed=0, test=Scores(tasks={"a": 0.5}, errors={}))]
    )
    report = suite_report(make_results(variants=(), missing=["rest"]).model_copy(
        update={"variants": {"full": part}}
    ))  # fmt: skip
    assert "Scores" in titles(report)
    assert "rest" in to_page(report)


def test_variants_stand_under_their_names() -> None:
    page = to_page(suite_report(make_results(seeds=1, variants=("full", "ia3"))))
    assert page.count("<h3>full</h3>") == page.count("<h3>ia3</h3>") == 9
    assert "<option>ia3: mats_kfac</option>" in page


class Tags(HTMLParser):
    """The tags and event attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.events: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.events += [name for name, _ in attrs if name.startswith("on")]


def evil_results() -> SuiteResults:
    """Every text anybody may choose is an attack."""
    text = make_variant(random.Random(0), 1).model_dump_json()
    for name in [*TASKS, "mats_kfac", "encoder.layer"]:
        text = text.replace(name, name + EVIL)
    whole = make_results(
        variants=(), title=EVIL, about=EVIL, name=EVIL, notes=[EVIL], missing=[EVIL], commit=EVIL,
        machine={EVIL: EVIL}, versions={EVIL: EVIL},
    )  # fmt: skip
    variant = VariantResults.model_validate_json(text)
    return whole.model_copy(update={"variants": {EVIL: variant, "other": variant}})


def test_text_stays_text() -> None:
    report = suite_report(evil_results())
    tags = Tags(to_page(report))
    assert "img" not in tags.found
    assert not tags.events
    assert tags.found.count("script") == 4  # ours alone
    markdown = re.sub(r"```yaml\n.*?\n```", "", to_markdown(report), flags=re.DOTALL)
    assert EVIL.split("|")[0] not in markdown
    assert not re.search(r"(?<!\\)[<`]", markdown)
    assert_tables_are_whole(markdown)


def assert_tables_are_whole(markdown: str) -> None:
    for above, line in pairwise(markdown.splitlines()):
        if above.startswith("|") and line.startswith("|"):
            bars = [len(re.findall(r"(?<!\\)\|", row)) for row in (above, line)]
            assert bars[0] == bars[1], line


def test_markdown_tables_are_whole() -> None:
    markdown = to_markdown(suite_report(make_results()))
    assert len(re.findall(r"(?m)^\|", markdown)) > 60
    assert_tables_are_whole(markdown)


def test_intermediate_tasks_are_drawn_and_say_what_was_chosen() -> None:
    found = [
        Intermediate(donor=d, method=m, seed=s, score=score + s / 10, error=0.1, chosen=chosen)
        for d, gain in (("big", 0.0), ("bigger", 0.2))
        for m, score, chosen in (
            ("individual", 0.1, {}),
            ("ties", 0.2 + gain, {"scale": 0.5, "weight.small": 0.1}),
            ("mats", 0.25 + gain, {}),
            ("sequential", 0.7, {}),
        )
        for s in (0, 1)
    ]
    drawn, scores, chosen = donor_scores(
        Variant(VariantResults(intermediate=found, target="RTE"), label=str.upper)
    )
    assert isinstance(drawn, Figure)
    assert isinstance(scores, Table)
    assert isinstance(chosen, Table)
    traces = {trace["name"]: trace for trace in drawn.plot.data}
    assert traces["TIES"]["x"] == pytest.approx([25, 45])
    assert traces["SEQUENTIAL"]["x"] == pytest.approx([75, 75])
    assert "MATS, the best" in drawn.caption
    assert str(scores.rows[2][2]) == "50.0 ± 5.0"
    assert chosen.rows == [["TIES", *2 * ["scale = 0.5, weight.small = 0.1"]]]
    assert scores.title.startswith("Test score of RTE, percent")
    assert chosen.title == "Chosen by validation (seed 0)"


def test_fixed_settings_are_said_to_be_fixed() -> None:
    results = make_results(seeds=1)
    methods = {"mats": {"method": "mats", "search": {"iterations": [1, 2]}}}
    tuned, fixed = (
        suite_report(results.model_copy(update={"suite": {"methods": m}})).shown[0].blocks
        for m in (methods, {"mats": {"method": "mats"}})
    )
    assert [type(block) for block in tuned] == [Paragraph, Table]
    assert [type(block) for block in fixed] == [Paragraph]
    assert isinstance(fixed[0], Paragraph)
    assert "fixed beforehand; test data was scored once" in fixed[0].text


def test_losses_that_are_no_numbers_leave_a_hole() -> None:
    whole = make_variant(random.Random(0), 1)
    assert whole.landscape is not None
    losses = {task: [list(row) for row in rows] for task, rows in whole.landscape.losses.items()}
    task = next(iter(losses))
    losses[task][0][0] = math.nan
    holed = whole.landscape.model_copy(update={"losses": losses})
    (shown,) = level_sets(Variant(whole.model_copy(update={"landscape": holed}), "full", str))
    assert isinstance(shown, Figure)
    contour = shown.plot.data[0]
    assert contour.z[0][0] is None
    assert contour.z[0][1] is not None
    assert math.isfinite(contour.contours.size)


def test_what_was_chosen_without_labels_and_what_is_no_merge() -> None:
    search = {"method": "mats", "search": {"iterations": [1, 2]}}
    methods = {"mats": search, "regmean": {**search, "unlabelled": True}}
    results = make_results(seeds=1).model_copy(update={"suite": {"methods": methods}})
    text = to_markdown(suite_report(results))
    assert "on validation data, of regmean by the distance to each task's own model instead" in text
    said = (
        "Not merged: individual: each task's own model; joint: one model trained on all tasks; "
        "ensemble: the mean of all models' probabilities; base: the model before fine-tuning."
    )
    assert said in text
    variant = results.variants["full"]
    alone = [row for row in variant.comparison if row.method in ("individual", "mats")]
    only = results.model_copy(
        update={"variants": {"full": variant.model_copy(update={"comparison": alone})}}
    )
    assert "Not merged: individual: each task's own model." in to_markdown(suite_report(only))


@pytest.mark.parametrize("variants", [("full",), ("full", "ia3")])
def test_markdown_has_no_heading_above_nothing(variants: tuple[str, ...]) -> None:
    report = suite_report(make_results(seeds=1, variants=variants))
    assert "Level sets" in titles(report)
    paragraphs = to_markdown(report).split("\n\n")
    assert "## Level sets" not in paragraphs
    for above, below in pairwise(paragraphs):
        level = len(above) - len(above.lstrip("#"))
        assert not (level and below.startswith("#")) or below.startswith("#" * (level + 1))


def test_a_page_is_small_enough() -> None:
    assert len(to_page(suite_report(make_results())).encode()) < 8_000_000


def test_there_is_no_minus_before_zero() -> None:
    assert [signed(x) for x in (-1e-5, 0.0, 1e-5, -0.012)] == ["+0.0", "+0.0", "+0.0", "−1.2"]
