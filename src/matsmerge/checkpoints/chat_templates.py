"""Chat templates that recipes name: those of the models, and well-known formats."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matsmerge.checkpoints.tokenizers import digest_files, read_tokenizer, templates_by_name
from matsmerge.errors import RecipeError, closest

_TURNS = "{% for message in messages %}TURN{% endfor %}{% if add_generation_prompt %}END{% endif %}"


def _turns(turn: str, end: str) -> str:
    """A template that writes every message alike, and at the end begins the answer."""
    return _TURNS.replace("TURN", turn).replace("END", end)


CHAT_TEMPLATES = {
    "chatml": _turns(
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "llama3": "{{ bos_token }}"
    + _turns(
        "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": "{{ bos_token }}"
    + _turns(
        "{% if message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
        "{% elif message['role'] == 'system' %}[INST] {{ message['content'] }}\n\n"
        "{% elif loop.previtem is defined and loop.previtem['role'] == 'system' %}"
        "{{ message['content'] }} [/INST]"
        "{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}",
        "",
    ),
    "alpaca": _turns(
        "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
        "{% else %}### Response:\n{{ message['content'] }}{{ eos_token }}\n\n{% endif %}",
        "### Response:\n",
    ),
    "exaone": _turns(
        "{% if loop.first and message['role'] != 'system' %}[|system|][|endofturn|]{{ '\n' }}"
        "{% endif %}[|{{ message['role'] }}|]{{ message['content'] }}"
        "{% if message['role'] != 'user' %}[|endofturn|]{% endif %}{{ '\n' }}",
        "[|assistant|]",
    ),
}


def choose_template(
    asked: str, folders: Sequence[Path | None], output: Path | None
) -> tuple[str | None, list[str]]:
    """The chat template of a recipe: auto, a name or a template; with notes on the choice.

    `folders` are those of the models, `output` the one whose files go with the result. None
    where there is nothing to write.
    """
    if not digest_files(output):
        return None, ["chat_template: the result has no tokenizer to have one; it is not written"]
    if asked == "auto":
        found: Counter[str] = Counter()
        for folder in dict.fromkeys(folder for folder in folders if folder):
            files = digest_files(folder)
            template = read_tokenizer(folder, files).chat_template if files else None
            found.update([text] if (text := templates_by_name(template).get("default")) else [])
        if not found:
            return None, ["chat_template: no model has one, and the result has none"]
        template, num = found.most_common(1)[0]
        return template, [f"chat_template: that of {num} of {len(set(folders))} models"]
    if asked in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[asked], []
    if "{" not in asked:
        raise RecipeError(
            f"chat_template: '{asked[:60]}' is neither auto nor a template, which has "
            f"{{{{ expressions }}}}, nor a known one{closest(asked, CHAT_TEMPLATES)}"
        )
    return asked, []
