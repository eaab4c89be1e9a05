"""YAML files that people write, read without surprises."""

from pathlib import Path
from typing import Any

import yaml

from matsmerge.errors import MatsError


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not a name", key_node.start_mark
            )
        if key in result:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' is given twice", key_node.start_mark
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path, error_type: type[MatsError]) -> Any:
    """What is in a YAML (or JSON) file; what is wrong with it is an error of this type."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise error_type(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise error_type(f"{path}: not valid YAML ({error})") from error
