"""Messages by hand: which tokens a template makes of them, and which of these are predicted."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tiny_models import WORDS, llama_config, make_tokenizer, save, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from matsmerge.data.template import Wording, Wordings
from matsmerge.errors import DataError
from matsmerge.tasks.conversation import encode_conversation
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile
from matsmerge.tasks.text_encoder import TextEncoder

SYSTEM, USER, ASSISTANT, THINK, END = 20, 21, 22, 23, 3
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ ' </s> ' }}{% endfor %}"
)
# As some models': what was thought is shown of the last answer alone.
FORGETFUL = (
    "{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ 'think ' }}{% endif %}"
    "{{ m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THINKING = TEMPLATE.replace("{{ 'assistant: ' }}", "{{ 'assistant: think ' }}")
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
TALK = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b c"},
    {"role": "assistant", "content": "d e"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "g"},
]
IDS = [SYSTEM, 4, END, USER, 5, 6, END, ASSISTANT, 7, 8, END, USER, 9, END, ASSISTANT, 10, END]
NO = IGNORED
ANSWERS = [NO] * 8 + [7, 8, END] + [NO] * 4 + [10, END]


def make_task(folder: Path, template: str | None = TEMPLATE, **options: Any) -> Any:
    words = [*WORDS, "system:", "user:", "assistant:", "think"]
    tokenizer = make_tokenizer(words, end=False, bos_token="<s>")
    tokenizer.chat_template = template
    save(LlamaForCausalLM(llama_config()), folder, tokenizer)
    return load_model(folder, TaskFile(**options)).task


def talk(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize("template", [TEMPLATE, THINKING])
def test_only_what_the_assistant_says_is_predicted(template: str, tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", template)
    example = task.encode({"messages": TALK}, 0)
    assert example.ids == IDS
    assert example.labels == ANSWERS
    assert task.notes == []


IM = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
POPULAR = {
    "chatml": (
        f"{{% for m in messages %}}{IM}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["how are you<|im_end|>\n", "what is it<|im_end|>\n"],
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        [" how are you</s>", " what is it</s>"],
    ),
}


@pytest.mark.parametrize("name", POPULAR)
def test_popular_templates_with_tokens_of_bytes(name: str) -> None:
    template, expected = POPULAR[name]
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(["how are you", "what is it assistant user"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    messages = talk("hello there", "how are you", "fine", "what is it")
    ids, counted = encode_conversation(TextEncoder(tokenizer, 512), messages, "assistant")
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    groups = groupby(zip(ids, counted, strict=True), key=lambda one: one[1])
    found = [tokenizer.decode([i for i, _ in group]) for is_counted, group in groups if is_counted]
    assert found == expected


def test_all_turns(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", turns="all")
    assert task.encode({"messages": TALK}, 0).labels == [NO, *IDS[1:]]
    without_answer = task.encode({"messages": TALK[:2]}, 0)
    assert without_answer.labels == [NO, *IDS[1:7]]


def test_a_template_that_marks_the_turns_is_believed(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", MARKED)
    example = task.encode({"messages": TALK}, 0)
    assert example.ids == IDS
    # The end is not within the mark here.
    assert example.labels == [NO] * 8 + [7, 8] + [NO] * 5 + [10, NO]


def test_other_spellings(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m")
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    other = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    rows: list[dict[str, Any]] = [
        {"conversations": other},
        {"messages": TALK, "id": 3},
        {"text": "a b"},
    ]
    examples = encode_all(task, write_rows(tmp_path / "d.jsonl", rows))
    assert [e.labels for e in examples] == [ANSWERS, ANSWERS, [NO, 4, 5]]
    renamed = write_rows(tmp_path / "e.jsonl", [{"chat": TALK}])
    (example,) = encode_all(task, renamed, {"messages": "chat"})
    assert example.labels == ANSWERS


def test_what_all_rows_have_wrong_is_said_at_once(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m")
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": None}, {"role": "user"}]},
        {"messages": "hello"},
        {"messages": []},
        {"messages": TALK[:2]},
        {"messages": ["hi"]},
        {"messages": TALK},
    ]
    with pytest.raises(DataError) as error:
        encode_all(task, write_rows(tmp_path / "d.jsonl", rows))
    said = [problem.partition("d.jsonl: ")[2] for problem in error.value.problems]
    assert said == [
        "row 1: 'messages': message 1: 'content': expected text, found null",
        "row 1: 'messages': message 2: 'content': there is none in this row",
        "row 2: 'messages': expected a list, found str 'hello'",
        "row 3: 'messages': holds no messages",
        "row 4: no message has the role 'assistant', only system, user, so none is predicted; "
        "leave it out, or count all with turns: all in a task file",
        "row 5: 'messages': message 1: expected role and content, found str 'hi'",
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ALTERNATING + TEMPLATE, r"row 1: the chat template fails on these messages \(user first"),
        ("{% for %}", r"row 1: the chat template fails on these messages \("),
        (FORGETFUL, "row 1: the chat template writes the messages up to the 3. in another way"),
        ("{{ 'a' }}", "row 1: the chat template writes no token that is predicted"),
    ],
)
def test_templates_that_do_not_work(template: str, expected: str, tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", template)
    with pytest.raises(DataError, match=expected):
        encode_all(task, write_rows(tmp_path / "d.jsonl", [{"messages": TALK}]))


def test_one_exchange_is_found_where_several_are_not(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", FORGETFUL)
    example = task.encode({"messages": TALK[:3]}, 0)
    assert example.labels == [NO] * 8 + [THINK, 7, 8, END]


def test_without_a_template(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", None)
    rows = write_rows(tmp_path / "d.jsonl", [{"messages": TALK}] * 3)
    with pytest.raises(DataError, match="m: the tokenizer has no chat template") as error:
        encode_all(task, rows)
    assert len(error.value.problems) == 1
    both = write_rows(tmp_path / "e.jsonl", [{"messages": TALK, "input": "a", "target": "b"}])
    (example,) = encode_all(task, both)  # which needs none
    assert example.ids == [2, 4, 5, END]
    with pytest.raises(DataError, match="give no template:, or one with a target"):
        encode_all(task, rows, wordings=Wordings([Wording(text="{messages}")]))


def test_a_conversation_that_is_too_long_loses_its_end(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", max_length=10)
    example = task.encode({"messages": TALK}, 0)
    assert (example.ids, example.labels) == (IDS[:10], ANSWERS[:10])
    assert task.notes == ["1 example was longer than 10 tokens and cut, by 7 tokens"]


def test_an_answer_is_always_kept(tmp_path: Path) -> None:
    """Where the question alone is too long, its beginning is lost, and the answer's end."""
    task = make_task(tmp_path / "m", max_length=6)
    question = " ".join("abcdefgh")
    example = task.encode({"messages": talk(question, "i")}, 0)
    assert example.ids == [10, 11, END, ASSISTANT, 12, END]
    assert example.labels == [NO] * 4 + [12, END]
    example = task.encode({"messages": talk(question, "i j k l m")}, 1)
    assert example.ids == [11, END, ASSISTANT, 12, 13, 14]
    assert example.labels == [NO] * 3 + [12, 13, 14]
    assert task.notes == ["2 examples were longer than 6 tokens and cut, the longest by 11 tokens"]


def test_texts_are_packed(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", packing=True, max_length=8)
    rows = [{"text": text} for text in ("a b", "c", "d e", "f g h i j k l m", "n")]
    examples = encode_all(task, write_rows(tmp_path / "d.jsonl", rows))
    ids = [[2, 4, 5, END, 2, 6, END], [2, 7, 8, END], [2, 9, 10, 11, 12, 13, 14, 15], [2, 17, END]]
    assert [e.ids for e in examples] == ids
    assert [e.labels for e in examples] == [[NO, *one[1:]] for one in ids]
    assert [e.number for e in examples] == [0, 1, 2, 3]
    assert task.notes == [
        "1 example was longer than 8 tokens and cut, by 1 token",
        "5 texts were packed into 4 sequences, each an example",
    ]


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    task = make_task(tmp_path / "m", packing=True)
    rows = write_rows(tmp_path / "d.jsonl", [{"messages": TALK}, {"input": "a", "target": "b"}])
    with pytest.raises(DataError, match="packing: joins rows of text alone") as error:
        encode_all(task, rows)
    assert len(error.value.problems) == 2
    choosing = load_model(tmp_path / "m", TaskFile(task="multiple_choice", packing=True)).task
    choices = write_rows(tmp_path / "e.jsonl", [{"input": "a", "choices": ["b", "c"], "label": 0}])
    with pytest.raises(DataError, match="packing: joins texts of causal_lm"):
        encode_all(choosing, choices)
    task.encoder.tokenizer.eos_token = None
    with pytest.raises(DataError, match="no token that ends a text"):
        encode_all(task, write_rows(tmp_path / "f.jsonl", [{"text": "a b"}]))
