"""Names and messages put into Markdown so that they show as they are and act as no markup."""

import re
from collections.abc import Iterable, Sequence

# A paragraph that begins so would be a list or a line.
_FIRST = re.compile(r"^([-+](?= )|-(?=--)|=|\d+(?=[.)](?: |$)))")


def escape(text: str) -> str:
    """Plain text in Markdown: no markup, no HTML, on one line, in a cell of a table too."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    text = "".join(char if char.isprintable() else "�" for char in text)
    text = re.sub(r"([\\`*\[\]<>|#&~$]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return _FIRST.sub(lambda found: _without_meaning(found[1]), text)


def _without_meaning(first: str) -> str:
    # A number keeps its digits; what follows it is what makes a list.
    return f"{first}\\" if first.isdigit() else f"\\{first}"


def table_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose columns after the first are numbers, aligned to the right."""
    first, *others = ([escape(str(cell)) for cell in row] for row in (header, *rows))
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (first, rule, *others))


def fenced(code: str, language: str) -> str:
    """Lines of code as they are, between fences longer than any in them."""
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", code))]))
    return f"{fence}{language}\n{code}{'' if code.endswith(chr(10)) else chr(10)}{fence}"
