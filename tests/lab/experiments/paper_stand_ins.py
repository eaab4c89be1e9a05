"""Tiny models of the paper's architectures, and rows as the hub's datasets have them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import bert_config, clip_config, make_tokenizer, save, t5_config, write_rows
from transformers import BertForPreTraining, CLIPModel, T5ForConditionalGeneration

from matsmerge.lab.experiments.suite import Suite

Row = dict[str, Any]
NUM_CLASSES = 3  # of images; the suites have up to 397


def _text(n: int, place: int = 0) -> str:
    """Words that the tiny tokenizer knows, another for every row and place."""
    letters = "abcdefghijklmnop"
    return f"{letters[(n + place) % 16]} {letters[(3 * n + 5 * place) % 16]} {letters[place % 16]}"


def _texts(n: int, *columns: str) -> Row:
    return {column: _text(n, place) for place, column in enumerate(columns)}


def _choices(n: int, names: str) -> Row:
    """As QASC and QuaRTz keep them."""
    texts = [_text(n, place) for place in range(len(names))]
    return {"choices": {"text": texts, "label": list(names)}, "answerKey": names[n % len(names)]}


def _image(n: int) -> Row:
    generator = torch.Generator().manual_seed(n)
    image = torch.randint(0, 256, (8, 8, 3), generator=generator).tolist()
    return {"image": image, "label": n % NUM_CLASSES}


# Row n of each dataset, with all of its columns.
ROWS: dict[str, Callable[[int], Row]] = {
    "Samsoup/cosmos_qa": lambda n: {
        **_texts(n, "id", "context", "question", "answer0", "answer1", "answer2", "answer3"),
        "label": n % 4,
    },
    "lighteval/siqa": lambda n: {
        **_texts(n, "context", "question", "answerA", "answerB", "answerC"),
        "label": str(n % 3 + 1),
    },
    "google-research-datasets/paws:labeled_final": lambda n: {
        "id": n,
        **_texts(n, "sentence1", "sentence2"),
        "label": n % 2,
    },
    "textmachinelab/quail": lambda n: {
        **_texts(n, "id", "context_id", "question_id", "domain", "context", "question"),
        "metadata": _texts(n, "author", "title", "url"),
        "question_type": "Causality",
        "answers": [_text(n, place) for place in range(4)],
        "correct_answer_id": n % 4,
    },
    "microsoft/wiki_qa": lambda n: {
        **_texts(n, "question_id", "question", "document_title", "answer"),
        "label": n % 2,
    },
    "allenai/quartz": lambda n: {
        **_texts(n, "id", "question", "para", "para_id"),
        **_choices(n, "AB"),
        "para_anno": {},
        "question_anno": {},
    },
    "allenai/qasc": lambda n: {
        **_texts(n, "id", "question", "fact1", "fact2", "combinedfact", "formatted_question"),
        **_choices(n, "ABCDEFGH"),
    },
    "allenai/ropes": lambda n: {
        **_texts(n, "id", "background", "situation", "question"),
        "answers": {"text": [_text(n, 4)]},
    },
    "juletxara/xstory_cloze:en": lambda n: {
        **_texts(n, "story_id", *(f"input_sentence_{i}" for i in (1, 2, 3, 4))),
        **_texts(n + 1, "sentence_quiz1", "sentence_quiz2"),
        "answer_right_ending": n % 2 + 1,
    },
    "allenai/winogrande:winogrande_xl": lambda n: {
        **_texts(n, "sentence", "option1", "option2"),
        "answer": str(n % 2 + 1),
    },
    "aps/super_glue:wsc.fixed": lambda n: {
        **_texts(n, "text", "span1_text", "span2_text"),
        **{"span1_index": 0, "span2_index": 2, "idx": n, "label": n % 2},
    },
    "nyu-mll/glue:rte": lambda n: {
        **_texts(n, "sentence1", "sentence2"),
        **{"label": n % 2, "idx": n},
    },
    "nyu-mll/glue:mnli": lambda n: {
        **_texts(n, "premise", "hypothesis"),
        **{"label": n % 3, "idx": n},
    },
    "nyu-mll/glue:qnli": lambda n: {
        **_texts(n, "question", "sentence"),
        **{"label": n % 2, "idx": n},
    },
    "nyu-mll/glue:qqp": lambda n: {
        **_texts(n, "question1", "question2"),
        **{"label": n % 2, "idx": n},
    },
    "tanganke/stanford_cars": _image,
    "tanganke/dtd": _image,
    "tanganke/eurosat": _image,
    "tanganke/gtsrb": _image,
    "tanganke/resisc45": _image,
    "tanganke/sun397": _image,
    "ylecun/mnist": _image,
    "ufldl-stanford/svhn:cropped_digits": _image,
}


def write_data(suite: Suite, folder: Path, num_rows: int = 6) -> Path:
    """A few rows of every split of every task, as `--data` takes them."""
    for number, (name, task) in enumerate(suite.tasks.items()):
        (folder / name).mkdir(parents=True)
        for part, split in enumerate(("train", "validation", "test")):
            first = 100 * number + part * num_rows
            make = ROWS[str(task.data)]
            rows = [make(n) for n in range(first, first + num_rows)]
            write_rows(folder / name / f"{split}.jsonl", rows)
    return folder


def make_t5(folder: Path) -> Path:
    """As T5-LM-Adapt is: a gated feed-forward layer, and an output layer of its own."""
    config = t5_config(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    config.num_layers = config.num_decoder_layers = 1
    return save(T5ForConditionalGeneration(config), folder, make_tokenizer(begin=False))


def make_clip(folder: Path) -> Path:
    return save(CLIPModel(clip_config()), folder, make_tokenizer())


def make_bert(folder: Path) -> Path:
    """As BERT is on the hub: with what it was pre-trained with, and names of long ago."""
    save(BertForPreTraining(bert_config()), folder, make_tokenizer())
    file = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, values in load_file(file).items():
        for new_ending, ending in old.items():
            name = name.replace(new_ending, ending)
        tensors[name] = values
    save_file(tensors, file, {"format": "pt"})
    return folder
