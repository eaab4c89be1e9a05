"""Scores of models task by task, in one coloured table."""

from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL
from matsmerge.lab.experiments.suite_results import BASE, JOINT
from matsmerge.lab.reports.document import Block, Paragraph
from matsmerge.lab.reports.scores import ScoreTable, paper_rows, score_rows
from matsmerge.lab.reports.variant import Variant

_REFERENCES = {
    INDIVIDUAL: "each task's own model",
    JOINT: "one model trained on all tasks",
    ENSEMBLE: "the mean of all models' probabilities",
    BASE: "the model before fine-tuning",
}


def suite_scores(variant: Variant) -> list[Block]:
    """Scores of a variant's methods, with the paper's where the setting is the same."""
    if (table := variant.table) is None:
        return []
    blocks = score_blocks(table)
    if said := [f"{name}: {what}" for name, what in _REFERENCES.items() if name in variant.rows]:
        blocks.append(Paragraph(f"Not merged: {'; '.join(said)}."))
    if variant.paper.setting:
        text = f"The paper's numbers are from its own setting: {variant.paper.setting}."
        blocks.append(Paragraph(text))
    return blocks


def score_blocks(table: ScoreTable) -> list[Block]:
    """Our scores, and the paper's if it has any."""
    title = f"Test {table.unit}, with standard errors {table.errors}"
    papers = paper_rows(table)
    return [score_rows(table, title), *([papers] if papers else [])]
