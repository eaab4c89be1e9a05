"""YAML that people write, read without surprises.

A few bytes of YAML can stand for billions of values by aliases of aliases, and a number can be
one that does not exist. So the text is read with limits, into text, numbers, lists and mappings
only, and whatever is wrong with it is one error that names the place.
"""

from pathlib import Path
from typing import Any

import yaml

from matsmerge.errors import MatsError
from matsmerge.files.guarded_files import check_unicode, quoted, read_text, reading
from matsmerge.files.mirror import fetch_path

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"  # <<: what another mapping has
# Dates are text, as in YAML 1.2: nothing that we read is a date.
_KEPT = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_MAX_BYTES = 2**20
_MAX_DEPTH = 50
_MAX_NODES = 50_000  # with every alias counted as what it stands for
_MAX_DIGITS = 100  # of a number


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML with limits, in which a key given twice is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # of complete nodes, aliases expanded

    def compose_document(self) -> Any:
        self._sizes.clear()  # of nodes of the document before, which are gone
        return super().compose_document()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _problem(f"more than {_MAX_DEPTH} levels deep", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and id(node) not in self._sizes:
            if node.end_mark is None:
                raise _problem("an alias of something that it is part of", mark)
            self._sizes[id(node)] = self._size(node)
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
            if max(self._sizes[id(node)], len(self._sizes)) > _MAX_NODES:
                raise _problem(f"more than {_MAX_NODES:,} values, aliases expanded", mark)
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.SequenceNode):
            return 1 + sum(self._sizes[id(item)] for item in node.value)
        if isinstance(node, yaml.MappingNode):
            return 1 + sum(self._sizes[id(part)] for pair in node.value for part in pair)
        return 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_text = node.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
        if isinstance(node, yaml.ScalarNode) and not is_text and len(node.value) > _MAX_DIGITS:
            raise _problem(f"a number of more than {_MAX_DIGITS} digits", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            # Such as 0x_ or !!int x, for which PyYAML has no error of its own.
            kind = node.tag.removeprefix(_TAG)
            raise _problem(f"{quoted(node.value)} is no valid {kind}", node.start_mark) from error


def _problem(text: str, mark: yaml.Mark | None) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, mark)


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse keys that are no names or are given twice, before << brings those of others."""
    own = set()
    for key, _ in node.value:
        if key.tag == _MERGE:
            continue
        if key.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
            shown = quoted(key.value) if isinstance(key, yaml.ScalarNode) else "of several values"
            raise _problem(f"the key {shown} is not a name", key.start_mark)
        if key.value in own:
            raise _problem(f"the key {quoted(key.value)} is given twice", key.start_mark)
        own.add(key.value)


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise _problem("expected a mapping", node.start_mark)
    loader.flatten_mapping(node)  # what comes from elsewhere by << stands first
    return {
        loader.construct_object(key_node, deep=True): loader.construct_object(value, deep=True)
        for key_node, value in node.value
    }


def _refuse_tag(_: _StrictLoader, node: yaml.Node) -> Any:
    tag = node.tag.replace(_TAG, "!!")
    raise _problem(
        f"{quoted(tag)}: expected text, numbers, lists and mappings only", node.start_mark
    )


_StrictLoader.yaml_constructors = {
    tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in _KEPT
}
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag in _KEPT]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_constructor(None, _refuse_tag)  # of all tags that have none


def read_yaml(path: Path, error_type: type[MatsError]) -> Any:
    """Read a YAML (or JSON) file; what is wrong with it is an error of this type."""
    return parse_yaml(_text_of(path, error_type), str(path), error_type)


def read_yaml_documents(path: Path, error_type: type[MatsError]) -> list[Any]:
    """Read a YAML file of one or several documents; empty ones are left out."""
    found = _parse(_text_of(path, error_type), str(path), error_type, yaml.load_all)
    return [one for one in found if one is not None] or [None]


def _text_of(path: Path, error_type: type[MatsError]) -> str:
    with reading(path, error_type):
        fetch_path(path)
    return read_text(path, error_type, _MAX_BYTES)


def parse_yaml(text: str, where: str, error_type: type[MatsError]) -> Any:
    """Parse YAML; `where` it was found is named in errors."""
    return _parse(text, where, error_type, yaml.load)


def _parse(text: str, where: str, error_type: type[MatsError], load: Any) -> Any:
    if len(text) > _MAX_BYTES:
        raise error_type(f"{where}: more than {_MAX_BYTES:,} characters of YAML")
    try:
        found = load(text, Loader=_StrictLoader)
        found = list(found) if load is yaml.load_all else found
        check_unicode(text, found)
        return found
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise error_type(f"{where}: not valid YAML ({_described(error)})") from error


def _described(error: Exception) -> str:
    """The place and the reason of a YAML error, in one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return place + ", ".join(part for part in (error.context, error.problem) if part)
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character {error.character:#x} at position {error.position}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
