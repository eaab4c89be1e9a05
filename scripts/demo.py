"""Four small networks, fine-tuned from one base, merged in several ways and scored.

Everything is made here, in a few seconds: a base network that has learnt general features of its
inputs, and four tasks that each ask something else of them. The merges are real ones, from files
to files, by the same command a user would type.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FOLDER = Path("demo")
TASKS = ("north", "south", "east", "west")
NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 16, 96, 4
MERGES = {
    "average": ["--method", "average"],
    "task arithmetic, scale 0.4": ["--method", "task_arithmetic", "--scale", "0.4"],
    "TIES, scale 0.8": ["--method", "ties", "--scale", "0.8"],
    "DARE + TIES": ["--method", "dare_ties", "--density", "0.8", "--scale", "0.8"],
    "model stock": ["--method", "model_stock"],
}


class Network(nn.Module):
    """An encoder that will be merged, and a head that stays with its task."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(NUM_INPUTS, NUM_HIDDEN),
            nn.GELU(),
            nn.Linear(NUM_HIDDEN, NUM_HIDDEN),
            nn.GELU(),
        )
        self.head = nn.Linear(NUM_HIDDEN, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


def labels(task: int, x: Tensor) -> Tensor:
    """Which of four cells the inputs fall into, in a plane of the task's own."""
    g = torch.Generator().manual_seed(100 + task)
    u, v, w = torch.randn(3, NUM_INPUTS, generator=g)
    return 2 * ((x @ u) * (x @ w) > 0).long() + (x @ v > 0).long()


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float) -> None:
    loss = nn.functional.cross_entropy if y.dtype == torch.long else nn.functional.mse_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        batch = torch.arange(step * 128, (step + 1) * 128) % len(x)
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()


def accuracy(model: nn.Module, task: int) -> float:
    x = torch.randn(4000, NUM_INPUTS, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return (model(x).argmax(1) == labels(task, x)).float().mean().item()


def make_models(console: Console) -> None:
    torch.manual_seed(0)
    x = torch.randn(6000, NUM_INPUTS)
    base = Network(24)
    with console.status("training the base"):
        pairs = torch.randn(2, NUM_INPUTS, 24)
        train(base, x, torch.tanh(x @ pairs[0]) * torch.tanh(x @ pairs[1]), 1500, 3e-3)
    for name, model in [("base", base), *((task, Network(NUM_CLASSES)) for task in TASKS)]:
        if name != "base":
            with console.status(f"fine-tuning on {name}"):
                model.encoder.load_state_dict(base.encoder.state_dict())
                train(model.head, base.encoder(x).detach(), labels(TASKS.index(name), x), 300, 1e-2)
                train(model, x, labels(TASKS.index(name), x), 500, 1e-3)
        (FOLDER / name).mkdir(parents=True)
        save_file(model.state_dict(), FOLDER / name / "model.safetensors")


def score(encoder: dict[str, Tensor], heads: dict[str, dict[str, Tensor]]) -> list[float]:
    """Accuracy of one encoder on all tasks, each with its own head."""
    scores = []
    for i, task in enumerate(TASKS):
        model = Network(NUM_CLASSES)
        model.load_state_dict(encoder | heads[task])
        scores.append(accuracy(model, i))
    return scores


def merge(options: list[str], out: Path) -> None:
    models = [option for task in TASKS for option in ("--model", str(FOLDER / task))]
    needs_base = "average" not in options
    subprocess.run(
        [Path(sys.executable).with_name("mats"), "merge", *options, *models, "--heads", "head.*",
         *(["--base", str(FOLDER / "base")] if needs_base else []), "--out", out, "--quiet"],
        check=True,
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_models(console)
    states = {task: load_file(FOLDER / task / "model.safetensors") for task in TASKS}
    heads = {t: {n: v for n, v in s.items() if n.startswith("head.")} for t, s in states.items()}
    base = load_file(FOLDER / "base" / "model.safetensors")
    rows = [("base encoder", score({n: v for n, v in base.items() if "encoder" in n}, heads))]
    for name, options in MERGES.items():
        out = FOLDER / f"merged-{options[1]}"
        with console.status(f"merging: {name}"):
            merge(options, out)
        kept = {task: load_file(out / "heads" / f"{task}.safetensors") for task in TASKS}
        rows.append((name, score(load_file(out / "model.safetensors"), kept)))
    encoders = {t: {n: v for n, v in s.items() if "encoder" in n} for t, s in states.items()}
    rows.append(
        ("four separate models", [score(encoders[t], heads)[i] for i, t in enumerate(TASKS)])
    )

    table = Table(title="accuracy on each task, in percent", title_justify="left", box=None)
    for column in ("", *TASKS, "mean"):
        table.add_column(column, justify="left" if not column else "right")
    for name, scores in rows:
        cells = [*scores, sum(scores) / len(scores)]
        table.add_row(name, *(f"{100 * s:.1f}" for s in cells))
    console.print(table)
    console.print(
        f"The models and the merges are in {FOLDER}/; try: mats inspect {FOLDER}/merged-ties"
    )


if __name__ == "__main__":
    main()
