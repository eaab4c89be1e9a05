from pathlib import Path

import pytest

from matsmerge.errors import DataError
from matsmerge.files.strict_yaml import parse_yaml, read_yaml


def levels(first: str, level: str) -> str:
    """Ten levels, each nine times the one before: 3.5 billion values."""
    lines = [f"a0: &a0 {first}"]
    for n in range(1, 11):
        nine = ", ".join([f"*a{n - 1}"] * 9)
        lines.append(f"a{n}: &a{n} {level % nine}")
    return "\n".join(lines)


BOMBS = {
    "aliases": (levels("[x]", "[%s]"), "line 6, column 5: more than 50,000 values"),
    "merge keys": (levels("{k: 1}", "{<<: [%s]}"), "more than 50,000 values"),
    "alias of itself": ("a: &a [*a]", "column 8: an alias of something that it is part of"),
    "mapping in itself": ("&a {b: *a}", "an alias of something that it is part of"),
    "merge of itself": ("a: &a {<<: *a}", "an alias of something that it is part of"),
    "brackets": ("[" * 3000, "more than 50 levels deep"),
    "closed brackets": ("[" * 3000 + "]" * 3000, "more than 50 levels deep"),
    "braces": ("{a: " * 3000, "more than 50 levels deep"),
    "dashes": ("- " * 3000, "more than 50 levels deep"),
    "values": ("- x\n" * 60_000, "more than 50,000 values"),
    "size": ("#" * 2_000_000, "more than 1,048,576 characters"),
    "digits": ("a: " + "9" * 5000, "line 1, column 4: a number of more than 100 digits"),
    "tagged digits": ("!!int '" + "9" * 5000 + "'", "a number of more than 100 digits"),
}


@pytest.mark.parametrize(("text", "message"), BOMBS.values(), ids=BOMBS)
def test_bombs(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_yaml(text, "some.yaml", DataError)
    assert str(caught.value).startswith("some.yaml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 0x_", "line 1, column 4: '0x_' is no valid int"),
        ("a: -0b_", "'-0b_' is no valid int"),
        ("a: !!int x", "'x' is no valid int"),
        ("a: !!int ''", "'' is no valid int"),
        ("a: !!float x", "'x' is no valid float"),
        ("a: !!bool x", "'x' is no valid bool"),
        ("a: !!map x", "expected a mapping"),
        ("a: !!str [x]", "expected a scalar node, but found sequence"),
        ("a: !!set {x}", "'!!set': expected text, numbers, lists and mappings only"),
        ("a: !!omap [x: 1]", "'!!omap': expected text"),
        ("a: !!pairs [x: 1]", "'!!pairs': expected text"),
        ("a: !!binary aGk=", "'!!binary': expected text"),
        ("a: !!timestamp 2020-99-99", "'!!timestamp': expected text"),
        ("a: !!python/name:os.system", "'!!python/name:os.system': expected text"),
        ("a: !own x", "'!own': expected text"),
        ("a: \0", "(the character 0x0 at position 3)"),
        ("a: \ud800", "(the character 0xd800 at position 3)"),
        (r'a: "\ud800"', r"(half a character, '\ud800')"),
        (r'a: "\U0000d800"', r"(half a character, '\ud800')"),
        (r'"\udc00": a', r"(half a character, '\udc00')"),
        (r'a: "\UFFFFFFFF"', "not valid YAML"),
        (f"%YAML {'1' * 5000}.1\n--- a", "not valid YAML"),
        ("1: 2", "the key '1' is not a name"),
        ("? [a]\n: 1", "the key of several values is not a name"),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is given twice"),
        ("<<: 5", "expected a mapping or list of mappings for merging"),
        ("a: [", "line 1, column 5: while parsing a flow node, expected the node content"),
        ("--- a\n--- b", "expected a single document in the stream, but found another document"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_yaml(text, "some.yaml", DataError)
    (problem,) = caught.value.problems
    assert problem.startswith("some.yaml: not valid YAML (")
    assert message in problem
    assert "unicode string" not in problem
    assert "\n" not in problem


def test_what_is_read() -> None:
    text = """
defaults: &defaults {scale: 0.5, steps: 10}
mine: {<<: *defaults, steps: 20}
twice: [*defaults, *defaults]
day: 2020-01-01
no_day: 2020-99-99
other: [1, -2.5, true, ~, "0x_", .inf, =]
"""
    defaults = {"scale": 0.5, "steps": 10}
    assert parse_yaml(text, "some.yaml", DataError) == {
        "defaults": defaults,
        "mine": {"scale": 0.5, "steps": 20},
        "twice": [defaults, defaults],
        # No value that we read is a date, so they are text.
        "day": "2020-01-01",
        "no_day": "2020-99-99",
        "other": [1, -2.5, True, None, "0x_", float("inf"), "="],
    }


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa4\n")
    assert read_yaml(path, DataError) == {"a": "ä"}
    path.write_bytes(b"a: \xff")
    with pytest.raises(DataError, match=r"some\.yaml: not UTF-8 text \(byte 0xff at position 3\)"):
        read_yaml(path, DataError)
    path.write_text("#" * 2_000_000)
    with pytest.raises(DataError, match="larger than the 1,048,576 bytes"):
        read_yaml(path, DataError)
    with pytest.raises(DataError, match="not a regular file"):
        read_yaml(Path("/dev/zero"), DataError)


def test_a_merge_of_a_merge_is_no_key_given_twice() -> None:
    text = "d: &d {lr: 1}\na: &a {<<: *d, lr: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a}\n"
    found = parse_yaml(text, "f", DataError)
    assert found["b"] == {"lr": 2, "x": 3}
    assert found["c"] == {"lr": 2}
