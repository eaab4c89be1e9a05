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
from made_up_results import MEANS, TASKS, make_merge, make_results, make_subspaces, make_variant

from matsmerge.lab.experiments.suite_results import (
    Intermediate,
    MethodRow,
    Scores,
    StepRecord,
    SuiteResults,
    VariantResults,
)
from matsmerge.lab.reports.document import Cell, Figure, Paragraph, Report, Table, TableChoice
from matsmerge.lab.reports.headline import comparison
from matsmerge.lab.reports.markdown import to_markdown
from matsmerge.lab.reports.numbers import signed
from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.scores import score_rows
from matsmerge.lab.reports.sections.donor_scores import donor_scores
from matsmerge.lab.reports.sections.level_sets import level_sets
from matsmerge.lab.reports.sections.rank_curves import rank_curves
from matsmerge.lab.reports.sections.subspace_figures import overlap_blocks
from matsmerge.lab.reports.suite_report import suite_report
from matsmerge.lab.reports.variant import Variant
from matsmerge.markdown_text import escape

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
        "Scores", "What was merged", "Init and objective", "Fisher information", "Iterations",
        "Rank of statistics", "Convergence of layers", "Cost", "Level sets", "Subspaces", "Intermediate tasks",
        "Recipes", "Provenance", "Parameters that were not solved",
    ]  # fmt: skip


def test_scores_by_rank_and_by_size() -> None:
    report = suite_report(make_results(seeds=2))
    shown = figure(report, "Accuracy against the rank of statistics")
    (by_rank,), (by_size,) = (
        shown.chart.series,
        figure(report, "Accuracy against their size").chart.series,
    )
    assert shown.chart.x.names == ["4", "16", "64", "full"]
    assert list(by_rank.xs) == [0, 1, 2, 3]
    assert list(by_rank.ys) == list(by_size.ys) == pytest.approx([80.0, 88.0, 89.6, 89.7])
    assert list(by_size.xs) == [10**6, 3 * 10**6, 10**7, 10**8]
    assert shown.caption.startswith(
        "mats_kfac of rank 64 is 0.1 points from whole statistics, with 10 % of their bytes. "
    )
    (table,) = tables(report, "Rank of statistics")
    assert [row[:3] for row in table.rows][::3] == [
        ["mats_kfac", "4", "1 MB"], ["mats_kfac", "full", "100 MB"]
    ]  # fmt: skip


def test_ranks_of_a_suite_that_is_not_finished() -> None:
    whole = make_variant(random.Random(0), 1)
    some = whole.model_copy(update={"ranks": whole.ranks[2:0:-1]})
    shown, *_ = rank_curves(Variant(some, "full", str))
    assert isinstance(shown, Figure)
    assert shown.chart.x.names == ["16", "64"]
    assert shown.caption.startswith("Mean test scores")
    assert rank_curves(Variant(whole.model_copy(update={"ranks": []}), "full", str)) == []


def test_the_figure_that_contributors_are_shown() -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(dedent(code), "CONTRIBUTING.md", "exec"), names)
    results = make_results(seeds=3)
    (shown,) = names["seed_spread"](Variant(results.variants["full"], "full", str))
    (dots,) = shown.chart.series
    spread = dict(zip(shown.chart.y.names, dots.xs, strict=True))
    ours = scores_of(results, "ties")
    assert spread["ties"] == pytest.approx(max(ours) - min(ours))
    alone = make_results(seeds=1).variants["full"]
    assert names["seed_spread"](Variant(alone, "full", str)) == []


def test_scores_are_means_with_errors_over_seeds() -> None:
    results = make_results(seeds=3)
    table = tables(suite_report(results), "Scores")[0]
    assert table.heads[:4] == ["", "mean", "mean against own models (95\u00a0%)", "paper's mean"]
    assert [row[0] for row in table.rows][:3] == ["mats_kfac", "mats (Gram)", "regmean"]
    assert [row[0] for row in table.rows][-4:] == ["individual", "joint", "ensemble", "base"]
    found = scores_of(results, "mats_kfac")
    cell = table.rows[0][1]
    assert isinstance(cell, Cell)
    assert cell.text == f"{fmean(found):.1f}"
    assert cell.error == f"{stdev(found) / 3**0.5:.1f}"
    assert cell.best
    assert not any(isinstance(c, Cell) and c.best for c in table.rows[-4])  # individual is no merge
    papers = table.rows[1][3]
    assert isinstance(papers, Cell)
    assert (papers.text, papers.papers) == ("81.5", True)


def test_of_one_seed_errors_are_over_examples() -> None:
    table = tables(suite_report(make_results(seeds=1)), "Scores")[0]
    mean, task = table.rows[0][1], table.rows[0][4]
    assert isinstance(mean, Cell)
    assert isinstance(task, Cell)
    assert task.error == "1.5"
    assert mean.error == f"{1.5 / len(TASKS) ** 0.5:.1f}"


def test_the_sentence_the_chart_and_the_table_agree() -> None:
    results = make_results()
    report = suite_report(results)
    (said,) = report.verdicts
    best, average, own = (
        fmean(scores_of(results, m)) for m in ("mats_kfac", "average", "individual")
    )
    assert said.headline.startswith(f"Use mats_kfac: {best:.1f}, ")
    assert said.headline.endswith(" five models at a fifth of the size")
    assert (
        f"closes {100 * (best - average) / (own - average):.0f}\u00a0% of the gap" in said.evidence
    )
    assert f"{signed((best - own) / 100)} against each task's own model" in said.evidence
    assert "paired over 200 examples a task and 3 seeds" in said.evidence
    assert said.figure is not None
    rows = tables(report, "Scores")[0].rows
    assert said.figure.chart.y.names == [row[0] for row in rows]
    assert list(said.figure.chart.ends) == [row[1].text for row in rows if isinstance(row[1], Cell)]
    drawn = next(one for one in said.figure.chart.series if one.colour == "accent")
    assert list(drawn.xs) == [pytest.approx(best)]
    costs = list(figure(report, "Operations against accuracy").chart.series[0].ys)
    assert best in [pytest.approx(cost) for cost in costs]


def test_means_of_a_seed_and_means_of_tasks_are_the_same() -> None:
    results = make_results(seeds=1)
    variant = Variant(results.variants["full"], "full", str)
    assert variant.table is not None
    for method, row in zip(variant.rows, variant.table.rows, strict=True):
        assert row.mean is not None
        assert row.mean.value == pytest.approx(variant.mean_scores[method])
        assert row.mean.value == pytest.approx(fmean(s.value for s in row.tasks.values()))


def test_every_variant_has_its_sentence() -> None:
    results = make_results(variants=("full", "ia3"), paper=False)
    results.suite["variants"] = {"full": {}, "ia3": {"training": {"adapter": "ia3"}}}
    report = suite_report(results)
    assert [v.name for v in report.verdicts] == ["full", "ia3"]
    assert report.verdicts[0].headline.endswith("five models at a fifth of the size")
    assert report.verdicts[1].headline.endswith("five models")  # whose base is shared
    page = to_page(report)
    assert "<h1>Seven small tasks, merged</h1>" in page
    assert f"<h2>ia3: {report.verdicts[1].headline}</h2>" in page
    assert f"**ia3: {escape(report.verdicts[1].headline)}.**" in to_markdown(report)


def made_of(*rows: tuple[str, float], right: bool = True) -> VariantResults:
    """Methods with one task of a thousand examples."""

    def text(share: float) -> str:
        return "".join("01"[i < 1000 * share] for i in range(1000))

    return VariantResults(
        tasks=["a", "b"],
        comparison=[
            MethodRow(
                method=method,
                seed=0,
                test=Scores(
                    tasks={"a": share, "b": share},
                    errors={"a": 0.02, "b": 0.02},
                    right={"a": text(share), "b": text(share)} if right else {},
                ),
            )
            for method, share in rows
        ],
    )


@pytest.mark.parametrize(
    ("rows", "right", "says"),
    [
        ((("ties", 0.80), ("individual", 0.80)), True, "Use ties: 80.0, level with two models"),
        ((("ties", 0.79), ("individual", 0.80)), True, "79.0, 1.0 points worse than two models"),
        ((("ties", 0.82), ("individual", 0.80)), True, "82.0, 2.0 points better than two models"),
        ((("ties", 0.79), ("individual", 0.80)), False, "79.0, not clearly worse than two models"),
        ((("ties", 0.79), ("average", 0.7)), True, "Use ties: 79.0, the best of two merges"),
        ((("ties", 0.79),), True, "Use ties: 79.0, score in percent"),
    ],
)
def test_what_the_sentence_says(
    rows: tuple[tuple[str, float], ...], right: bool, says: str
) -> None:
    results = make_results(variants=(), paper=False)
    results = results.model_copy(update={"variants": {"full": made_of(*rows, right=right)}})
    (said,) = suite_report(results).verdicts
    assert says in said.headline
    assert ("paired over 1,000 examples a task" in said.evidence) == (right and len(rows) > 1)


def test_an_interval_reaches_the_line_where_nothing_is_shown() -> None:
    close, far = (
        made_of(("ties", 0.79), ("individual", 0.80), right=False),
        made_of(("ties", 0.7), ("individual", 0.80)),
    )
    for found, reaches in ((close, True), (far, False)):
        table = Variant(found, label=str).table
        assert table is not None
        drawn = comparison(table)
        assert drawn is not None
        one = next(s for s in drawn.chart.series if s.colour == "accent")
        (span,) = one.x_spans
        assert span is not None
        assert (span[0] <= 80 <= span[1]) == reaches
        assert (span[0] + span[1]) / 2 == pytest.approx(one.xs[0])


def test_the_model_is_where_the_page_says(tmp_path: Path) -> None:
    results = make_results(seeds=1)
    key = "0123456789abcdef"
    step = StepRecord(name="merge full 0 mats_kfac", kind="merge", key=key, seconds=1)
    results = results.model_copy(update={"steps": [step]})
    (said,) = suite_report(results, tmp_path, "runs/made-up").verdicts
    assert said.code is None  # no model there
    (tmp_path / "steps" / f"merge-full-0-mats_kfac-{key[:12]}" / "model").mkdir(parents=True)
    for row in results.variants["full"].comparison:
        if row.merge:
            row.merge["heads"] = {"paws": ["head"], "qasc": ["head"]}
    (said,) = suite_report(results, tmp_path, "runs/made-up").verdicts
    assert said.code is not None
    place = "runs/made-up/steps/merge-full-0-mats_kfac-0123456789ab/model"
    assert said.code.title == f"The model is in {place}"
    assert f'matsmerge.load("{place}", task="paws")  # or qasc' in said.code.text
    assert str(tmp_path) not in to_page(suite_report(results, tmp_path, "runs/made-up"))


def test_scores_are_coloured_by_the_distance_to_own_models() -> None:
    found = made_of(("ties", 0.82), ("average", 0.7), ("individual", 0.80), ("base", 0.3))
    table = Variant(found, label=str).table
    assert table is not None
    shown = score_rows(table)
    shades = {str(row[0]): row[1].shade for row in shown.rows if isinstance(row[1], Cell)}
    assert shades["ties"] == pytest.approx(0.2)
    assert shades["average"] == pytest.approx(-1)
    assert shades["individual"] == 0
    assert shades["base"] is not None
    assert shades["base"] < -1  # drawn as the strongest
    assert list(shown.shades) == ["10.0 worse", "as the task's own model", "10.0 better"]
    assert "--s:100%" in to_page(suite_report(make_results(seeds=1)))


def test_convergence_opens_on_the_winner() -> None:
    report = suite_report(make_results(seeds=1))
    section = next(s for s in report.shown if s.title == "Convergence of layers")
    block = section.blocks[0]
    assert isinstance(block, TableChoice)
    assert [table.title for table in block.tables] == ["mats_kfac", "mats (Gram)"]
    table = block.tables[0]
    assert table.heads == ["module, by layer", *map(str, range(12))]
    assert [row[0] for row in table.rows] == ["query", "dense"]
    cells = [cell for cell in table.rows[0][1:] if isinstance(cell, Cell)]
    for i, cell in enumerate(cells):
        residual = 0.1 * (0.5 + 0.03 * i) ** 20
        share = min(max((math.log10(residual) + 6) / 6, 0), 1)
        assert cell.shade == pytest.approx(-share)
        assert "after 20 iterations, objective 20 %" in cell.title
    page = to_page(report)
    assert page.count("<div data-choice>") == 1
    assert page.count("<div data-choice hidden>") == 1


def test_init_and_objective_hold_scores_and_gains() -> None:
    results = make_results()
    cells = results.variants["full"].heat_map
    (table,) = tables(suite_report(results), "Init and objective")
    mine = [c for c in cells if (c.init, c.objective) == ("ties", "kfac")]
    score = fmean(c.score for c in mine)
    shown = table.rows[2][5]
    assert isinstance(shown, Cell)
    assert shown.text == f"{100 * score:.1f} ({signed(score - MEANS['ties'])})"
    shades = [c.shade for row in table.rows for c in row if isinstance(c, Cell)]
    assert max(abs(shade or 0) for shade in shades) == pytest.approx(1)


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
    table, *_ = overlap_blocks(found)
    assert isinstance(table, Table)
    assert table.rows[0][2] == "–"
    assert isinstance(table.rows[0][3], Cell)
    assert table.rows[0][3].shade == pytest.approx(found["overlap"][0][2])


def test_an_unfinished_suite_names_what_is_missing() -> None:
    results = make_results(variants=(), missing=["train wsc, seed 2", EVIL])
    report = suite_report(results)
    assert titles(report) == ["What was merged", "Provenance"]
    assert "train wsc, seed 2" in to_page(report)
    assert "train wsc, seed 2" in to_markdown(report)
    part = VariantResults(
        comparison=[MethodRow(method="average", seed=0, test=Scores(tasks={"a": 0.5}, errors={}))]
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
    assert tags.found.count("script") == 2  # ours alone
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


def test_intermediate_tasks_are_coloured_and_say_what_was_chosen() -> None:
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
    scores, chosen = donor_scores(
        Variant(VariantResults(intermediate=found, target="RTE"), label=str.upper)
    )
    assert isinstance(scores, Table)
    assert isinstance(chosen, Table)
    own, ties = scores.rows[0][1], scores.rows[1][2]
    assert isinstance(own, Cell)
    assert isinstance(ties, Cell)
    assert own.shade == 0
    assert ties.shade == pytest.approx((45 - 15) / (75 - 15))
    assert str(scores.rows[2][2]) == "50.0 ± 5.0"
    assert chosen.rows == [["TIES", *2 * ["scale = 0.5, weight.small = 0.1"]]]
    assert scores.title.startswith("Test score of RTE, percent")
    assert chosen.title == "Chosen by validation (seed 0)"


def test_fixed_settings_are_said_to_be_fixed() -> None:
    results = make_results(seeds=1)
    methods = {"mats": {"method": "mats", "search": {"iterations": [1, 2]}}}
    tuned, fixed = (
        suite_report(results.model_copy(update={"suite": {"methods": m}})).shown[1].blocks
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
    lines = [one for one in shown.chart.series if one.line]
    assert lines
    assert all(math.isfinite(v) for one in lines for v in (*one.xs, *one.ys))


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


def test_a_page_is_small() -> None:
    """With everything in it; and of one that merges a language model by ten methods, too."""
    assert len(to_page(suite_report(make_results())).encode()) < 400_000
    assert len(to_page(suite_report(with_many_layers())).encode()) < 400_000


def with_many_layers() -> SuiteResults:
    """32 layers of 7 modules, solved by all methods."""
    results = make_results(seeds=1)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for row in results.variants["full"].comparison:
        if row.merge:
            solved = make_merge("mats", {})["parameters"]["encoder.layer.3.query.weight"]
            row.merge["parameters"] = {
                f"model.layers.{i}.mlp.{m}.weight": solved for i in range(32) for m in modules
            }
    return results


def test_there_is_no_minus_before_zero() -> None:
    assert [signed(x) for x in (-1e-5, 0.0, 1e-5, -0.012)] == ["+0.0", "+0.0", "+0.0", "−1.2"]
