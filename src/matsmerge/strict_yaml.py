"""YAML files that people write, read without surprises."""

from pathlib import Path
from typing import Any

import yaml

from matsmerge.errors import MatsError

_MERGE = "tag:yaml.org,2002:merge"  # <<: what another mapping has


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not a name", key_node.start_mark
            )
        if key in own:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' is given twice", key_node.start_mark
            )
        own.add(key)
    loader.flatten_mapping(node)  # what comes from elsewhere by << stands first
    return {
        loader.construct_object(key_node, deep=True): loader.construct_object(value, deep=True)
        for key_node, value in node.value
    }


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path, error_type: type[MatsError]) -> Any:
    """What is in a YAML (or JSON) file; what is wrong with it is an error of this type."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise error_type(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise error_type(f"{path}: not valid YAML ({error})") from error
