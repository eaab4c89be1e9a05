"""What recipes say of tokenizers, in our form and in mergekit's."""

from typing import Any

import pytest

from matsmerge.errors import RecipeError
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.recipes.tokenizer_spec import MeanRow, TokenizerSpec, TokenRow, ZeroRow


def recipe(tokenizer: Any, **others: Any) -> Recipe:
    return make_recipe(
        {"models": ["a", "b"], "method": "average", "tokenizer": tokenizer, **others}
    )


def test_a_source_is_enough() -> None:
    assert recipe("union").tokenizer == TokenizerSpec()
    assert recipe("union").published["tokenizer"] == {"source": "union"}
    assert recipe("base").tokenizer == TokenizerSpec(source="base")
    assert recipe(None).tokenizer is None
    assert recipe({"source": "a", "tokens": None}).tokenizer == TokenizerSpec(source="a")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ({"model": {"path": "x/y"}}, "x/y"),
        ({"model": {"path": "x/y", "revision": "main"}}, "x/y@main"),
        ({"path": "x/y"}, "x/y"),
        ("x/y", "x/y"),
    ],
)
def test_mergekits_references(reference: Any, expected: str) -> None:
    for given in (reference, {"source": reference}):
        spec = recipe(given).tokenizer
        assert spec is not None
        assert spec.source == expected


def test_rules_for_tokens() -> None:
    spec = recipe(
        {
            "tokens": {
                "<a>": {"source": "a"},
                "<b>": {"source": {"kind": "zero"}, "force": True},
                "<c>": {"source": {"kind": "model_token", "model": "b", "token": "x"}},
                "<d>": {"source": {"kind": "model_token", "model": {"path": "b"}, "token_id": 5}},
                "<e>": {"source": {"kind": "mean"}},
                "<f>": {},
            },
            "pad_to_multiple_of": 64,
        }
    ).tokenizer
    assert spec is not None
    sources = {token: rule.source for token, rule in spec.tokens.items()}
    assert sources == {
        "<a>": "a",
        "<b>": ZeroRow(kind="zero"),
        "<c>": TokenRow(kind="model_token", model="b", token="x"),
        "<d>": TokenRow(kind="model_token", model="b", token_id=5),
        "<e>": MeanRow(kind="mean"),
        "<f>": None,
    }
    assert [token for token, rule in spec.tokens.items() if rule.force] == ["<b>"]
    assert make_recipe(recipe(spec.model_dump()).model_dump()).tokenizer == spec


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"sauce": "union"}, "tokenizer: unknown key 'sauce'; did you mean 'source'"),
        ({"pad_to_multiple_of": 0}, "tokenizer.pad_to_multiple_of: "),
        ({"tokens": {"<x>": {"forced": True}}}, "unknown key 'forced'"),
        ({"tokens": {"<x>": {"source": {"kind": "model_token", "model": "a"}}}}, "either token or"),
        ({"tokens": {"<x>": {"source": {"kind": "model_token", "model": "a", "token": "x",
                                        "token_id": 3}}}}, "either token or token_id"),
        ({"tokens": {"<x>": {"source": {"kind": "one"}}}}, "'one'"),
        (5, "tokenizer: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tokenizer: Any, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(tokenizer)
    assert message in str(error.value)


def test_it_cannot_be_ignored_as_well() -> None:
    with pytest.raises(RecipeError, match="exclude each other"):
        recipe("union", ignore_tokenizers=True)


def test_mergekits_two_keys() -> None:
    def translated(**keys: Any) -> Any:
        models = [{"model": m, "parameters": {"weight": 1}} for m in ("a", "b")]
        data = {"merge_method": "linear", "models": models, **keys}
        return from_mergekit(data)[0].get("tokenizer")

    assert translated(tokenizer_source="union") == {"source": "union"}
    assert translated(tokenizer={"source": "b"}) == {"source": "b"}
    assert translated() is None
    with pytest.raises(RecipeError, match="say the same"):
        translated(tokenizer_source="union", tokenizer={"source": "base"})
