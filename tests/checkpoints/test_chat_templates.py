import json
from pathlib import Path

import jinja2
import pytest

from matsmerge import RecipeError
from matsmerge.checkpoints.chat_templates import CHAT_TEMPLATES, choose_template

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
]
EXPECTED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<b><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<b>[INST] S\n\nU [/INST] A<e>",
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA<e>\n\n### Response:\n",
    "exaone": "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|assistant|]",
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_what_they_write(name: str) -> None:
    # As transformers sets it up.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CHAT_TEMPLATES[name])
    found = template.render(
        messages=TALK, add_generation_prompt=True, bos_token="<b>", eos_token="<e>"
    )
    assert found == EXPECTED[name]


def test_exaone_begins_with_a_system_message() -> None:
    template = jinja2.Environment(trim_blocks=True).from_string(CHAT_TEMPLATES["exaone"])
    found = template.render(messages=TALK[1:2])
    assert found == "[|system|][|endofturn|]\n[|user|]U\n"


def folder_with(path: Path, template: str | None) -> Path:
    path.mkdir()
    config = {"chat_template": template} if template else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_auto_is_what_most_models_have(tmp_path: Path) -> None:
    folders = [folder_with(tmp_path / str(i), t) for i, t in enumerate(["x{}", None, "y{}", "y{}"])]
    assert choose_template("auto", [*folders, folders[0]], folders[1])[0] == "y{}"
    assert choose_template("auto", folders[1:2], folders[1])[0] is None
    assert choose_template("chatml", folders, folders[0])[0] == CHAT_TEMPLATES["chatml"]
    assert choose_template("{{ x }}", folders, folders[0])[0] == "{{ x }}"
    found, notes = choose_template("chatml", folders, tmp_path)
    assert found is None
    assert "no tokenizer" in notes[0]


def test_no_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", None)
    with pytest.raises(RecipeError, match="did you mean 'chatml'"):
        choose_template("chatlm", [folder], folder)
