"""The deployment file as a JSON Schema, by which editors complete it and underline what is wrong."""

from collections.abc import Iterator
from typing import Any

from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.section import docs_of, fields_of


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12), with the meaning of every field.

    It knows each field by itself. What must fit together between several is said where the file is loaded.
    """
    schema = DeploymentFile.model_json_schema(by_alias=True)
    sections = {each.__name__: each for each in _sections(DeploymentFile)}
    for name, found in ((DeploymentFile.__name__, schema), *schema["$defs"].items()):
        docs = docs_of(sections[name])
        for field in fields_of(sections[name]).values():
            shown = _as_in_files(found["properties"][field.name_in_file])
            if field.name in docs:
                shown["description"] = docs[field.name]
            # A section's own fields say their defaults.
            if field.section is not None:
                shown.pop("default", None)
            found["properties"][field.name_in_file] = shown
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A deployment file of prfaas",
    }


def _as_in_files(shown: dict[str, Any]) -> dict[str, Any]:
    """Without what only the code can say: null, and a default that stands for "left out"."""
    kinds = [each for each in shown.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        shown = {**{name: value for name, value in shown.items() if name != "anyOf"}, **kinds[0]}
    default, least = shown.get("default"), shown.get("minimum")
    if "default" in shown and (default is None or (least is not None and default < least)):
        del shown["default"]
    return {name: value for name, value in shown.items() if name != "title"}


def _sections(section: type) -> Iterator[type]:
    yield section
    for field in fields_of(section).values():
        for each in field.sections:
            yield from _sections(each)
