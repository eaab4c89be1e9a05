"""Pages of the documentation that are made from the code when the site is built; a mkdocs hook.

The home page is the README; the reference is read from the commands, the pydantic models and the
names that the package exports. Nothing of it is kept in docs/, so nothing of it can be out of date.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of docs/; mkdocs calls this."""
    from mkdocs.structure.files import File

    for path, text in make_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def make_pages() -> dict[str, str]:
    """Every page that is made, by its path."""
    return {
        "index.md": "---\nhide: [navigation]\n---\n" + from_root("README.md"),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changelog.md": from_root("CHANGELOG.md"),
        "reference/python.md": python_page(),
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        "reference/files.md": files_page(),
    }


def from_root(name: str) -> str:
    """A page of the repository's first folder, with links as they are within docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")
    text = text.replace("](CHANGELOG.md", "](changelog.md")
    # What the site does not have is named, not linked.
    return re.sub(r"\[([^\]]+)\]\((?:CITATION|LICENSE|notebooks/|Dockerfile)[^)]*\)", r"`\1`", text)


def python_page() -> str:
    """Everything that `matsmerge` and `matsmerge.lab` export; mkdocstrings reads the docstrings."""
    import matsmerge
    from matsmerge import errors, lab

    def entries(homes: Mapping[str, str], names: list[str], package: str) -> Iterator[str]:
        for name in names:
            home = homes.get(name, errors.__name__)
            options = f"      heading: {package}.{name}\n      toc_label: {name}\n"
            yield f"::: {home}.{name}\n    options:\n{options}"

    homes = matsmerge._HOMES
    names = [n for n in matsmerge.__all__ if n in homes and n[0].islower()]
    classes = [n for n in matsmerge.__all__ if n in homes and n[0].isupper()]
    problems = [n for n in matsmerge.__all__ if n.endswith("Error")]
    parts = [
        "# Python\n\nWhat `import matsmerge` gives, from its docstrings. Methods with their "
        "options are classes of `matsmerge.methods`; [recipes](recipes.md#methods) lists them.\n",
        "## Functions\n",
        *entries(homes, names, "matsmerge"),
        "## Classes\n",
        *entries(homes, classes, "matsmerge"),
        "## Errors\n",
        *entries(homes, problems, "matsmerge"),
        "## The lab\n\n`pip install 'matsmerge[lab]'`\n",
        *entries(lab._HOMES, list(lab.__all__), "matsmerge.lab"),
    ]
    return "\n".join(parts)


def commands_page() -> str:
    """Every command with its arguments and options."""
    from matsmerge.cli.commands import COMMANDS, make_app
    from matsmerge.cli.help_page import param_names, param_text, shown_params, usage

    parts = ["# Commands\n\nWhat `mats COMMAND --help` says, for all commands.\n"]
    for name, command in walk_commands(typer.main.get_command(make_app(*COMMANDS)), "mats"):
        context: Any = command.make_context(name, [], resilient_parsing=True)
        parts.append(f"## {name}\n\n```text\n{usage(command, context)}\n```\n")
        about = textwrap.dedent(command.help or "")
        parts.append(re.sub(r"^mats ", "    mats ", about, flags=re.MULTILINE) + "\n")
        panels: dict[str, list[list[str]]] = {}
        for param in shown_params(command, context):
            kind = "Options" if param_names(param).startswith("-") else "Arguments"
            rows = panels.setdefault(getattr(param, "rich_help_panel", None) or kind, [])
            rows.append([_code(param_names(param)), param_text(param)])
        for panel, rows in panels.items():
            parts.append(f"**{panel}**\n\n{_table(['option', 'what it does'], rows)}")
    return "\n".join(parts)


def walk_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands below a group, with the words that call them."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, child in command.commands.items():
        yield from walk_commands(child, f"{name} {word}")


@cache
def recipes_page() -> str:
    """The keys of recipes, and every method, objective and solver with its options."""
    from matsmerge.methods.parts import part_classes
    from matsmerge.recipes.model_data import ModelData
    from matsmerge.recipes.recipe import Recipe
    from matsmerge.recipes.recipe_parts import ModelEntry, Override

    methods, objectives, solvers = part_classes().values()
    parts = [
        "# Recipes\n\nThe keys of a recipe file. `mats schema` prints the same as JSON Schema.\n"
    ]
    keys: list[tuple[str, type[BaseModel]]] = [
        ("Recipe", Recipe),
        ("A model", ModelEntry),
        ("A model's data", ModelData),
        ("An override", Override),
    ]
    for title, model in keys:
        parts.append(f"## {title}\n\n{_about(model)}\n\n{fields_table(model)}")
    for title, table in (("Methods", methods), ("Objectives", objectives), ("Solvers", solvers)):
        parts.append(f"## {title}\n")
        for name, cls in table.items():
            options = fields_table(cls) if cls.model_fields else "No options.\n"
            parts.append(f"### {name}\n\n{_about(cls)}\n\n{options}")
    return "\n".join(parts)


def files_page() -> str:
    """The files that people write and exchange besides recipes."""
    from matsmerge.lab.experiments.suite import Suite
    from matsmerge.lab.experiments.suite_parts import MethodOfSuite, VariantOfSuite
    from matsmerge.lab.tuning.tuning_file import TuningFile
    from matsmerge.statistics import statistics
    from matsmerge.tasks.task_file import TaskFile

    sections: dict[str, list[tuple[str, type[BaseModel]]]] = {
        "A task (YAML)": [("", TaskFile)],
        "A search (YAML)": [("", TuningFile)],
        "A suite (YAML)": [("", Suite), ("variants", VariantOfSuite), ("methods", MethodOfSuite)],
        "Statistics (safetensors)": [
            ("", statistics.Header),
            ("maps", statistics.Map),
            ("sets", statistics.Set),
            ("model, data", statistics.Origin),
            ("sketching", statistics.Sketching),
        ],
    }
    about = {
        "A task (YAML)": "[Tasks](../tuning.md#task-files) shows some.",
        "A search (YAML)": "What `mats tune` takes; see [tuning](../tuning.md#tuning).",
        "A suite (YAML)": "What `mats experiment run` takes; see [experiments](../experiments.md).",
        "Statistics (safetensors)": "The JSON under the metadata key `matsmerge_statistics`. How "
        "arrays are named and stored is in [statistics](../statistics.md#the-file).",
    }
    parts = [
        "# Files\n\nThe keys of files that are written by people or read by other programs. "
        "[Merging](../merging.md#the-output) lists what a merged model's folder holds, and "
        "[the mathematics](../mats.md#what-mergejson-says) what `merge.json` says.\n"
    ]
    for title, models in sections.items():
        parts.append(f"## {title}\n\n{about[title]}\n")
        for key, model in models:
            heading = f"**Under `{key}`.** " if key else ""
            parts.append(f"{heading}{_about(model)}\n\n{fields_table(model)}")
    return "\n".join(parts)


def fields_table(model: type[BaseModel]) -> str:
    """The fields of a pydantic model: key, type, default, description."""
    whole = model.model_json_schema()
    # One that can be a part of itself is a reference to its definition.
    own = whole["$defs"][whole["$ref"].split("/")[-1]] if "$ref" in whole else whole
    schema = own["properties"]
    comments = _comments(model)
    rows = []
    for name, field in model.model_fields.items():
        key = next(k for k in (name, field.alias, field.validation_alias) if k in schema)
        text = field.description or comments.get(name, "")
        required = field.is_required()
        default = "required" if required else _default(field.get_default(call_default_factory=True))
        rows.append([_code(str(key)), _type(schema[key]), default, text])
    return _table(["key", "type", "default", ""], rows)


def _about(model: type[BaseModel]) -> str:
    """A class's own docstring; lines that are indented in it stay as they are."""
    return inspect.cleandoc(model.__dict__.get("__doc__") or "")


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """Comments behind the fields of a class and of those it derives from."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not cls.__module__.startswith("matsmerge"):
            continue
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        body = ast.parse("\n".join(lines)).body[0]
        for node in getattr(body, "body", ()):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, mark, text = lines[(node.end_lineno or 1) - 1].partition("  # ")
                if mark and not text.startswith(("noqa", "type:")):
                    found[node.target.id] = text
    return found


def _type(schema: Mapping[str, Any]) -> str:
    """What a JSON Schema asks for, in words."""
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_type(one) for one in schema.get("anyOf", schema.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind))
    if "enum" in schema:
        values = schema["enum"]
        return "a name" if len(values) > 6 else ", ".join(_code(str(v)) for v in values)
    if "const" in schema:
        return _code(str(schema["const"]))
    match schema.get("type"):
        case "null":
            return ""
        case "array":
            return f"list of {_type(schema.get('items', {})) or 'values'}"
        case "object":
            return "mapping"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case str(kind):
            return kind
    return "mapping" if "$ref" in schema else ""


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is None or value in ({}, [], (), ""):
        return ""
    if isinstance(value, BaseModel):
        own = getattr(value, "name", "")
        options = {key: getattr(value, key) for key in value.model_fields_set}
        shown = ", ".join(f"{key}: {option}" for key, option in options.items())
        return _code(f"{own} ({shown})" if shown else own) if own else ""
    return _code(str(value).lower() if isinstance(value, bool) else str(value))


def _code(*texts: str) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[" ".join(str(c).split()).replace("|", "\\|") for c in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
