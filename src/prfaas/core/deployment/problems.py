"""What is wrong with a field of a deployment file, by pydantic's word, in one sentence of ours."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prfaas.core.deployment.schema import DeploymentFile
from prfaas.core.deployment.section import fields_of
from prfaas.core.deployment.source import DeploymentError, Location, YamlSource

_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": 'must be a mapping ("name: value" lines)',
    "dataclass_type": 'must be a mapping ("field: value" lines)',
    "model_type": 'must be a mapping ("field: value" lines)',
    "model_attributes_type": 'must be a mapping ("field: value" lines)',
    "string_pattern_mismatch": 'must be letters, digits, ".", "_" and "-", starting with a letter or digit',
    "string_too_short": "must not be empty",
    "too_short": "must have at least one entry",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NO_FORM = ("union_tag_not_found", "union_tag_invalid")
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def first_problem(source: YamlSource, error: ValidationError) -> DeploymentError:
    """The finding that stands first in the file, unknown fields before others: they often explain those."""

    # A list whose entries are wrong counts as too short besides.
    def order(details: ErrorDetails) -> tuple[bool, bool, int]:
        kind = details["type"]
        return kind not in _UNKNOWN, kind == "too_short", source.line(_place(details)[0]) or 0

    details = min(error.errors(), key=order)
    location, section = _place(details)
    if details["type"] in _UNKNOWN:
        return source.error(location, _unknown_field(str(location[-1]), section))
    return source.error(location, _sentence(details))


def _place(details: ErrorDetails) -> tuple[Location, type]:
    """Where a finding is in the file, and the section there."""
    location: list[str | int] = []
    section: type = DeploymentFile
    forms: Mapping[str, type] = {}
    for part in details["loc"]:
        # A bad key of a mapping is reported at (…, key, "[key]"), a field of one form of a section behind its name.
        if part in forms:
            section, forms = forms[str(part)], {}
        elif part != "[key]":
            location.append(part)
            field = fields_of(section).get(str(part))
            if field is not None and field.sections:
                section, forms = field.section or section, field.forms
    if details["type"] in _NO_FORM and isinstance(details["input"], dict):
        location.append(details["ctx"]["discriminator"].strip("'"))
    return tuple(location), section


def _sentence(details: ErrorDetails) -> str:
    kind, value = details["type"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    if kind in _NO_FORM:
        if not isinstance(value, dict):
            kind = "model_type"
        elif "expected_tags" in context:
            return f"must be one of {_list_of(context['expected_tags'])}, not {_shown(context['tag'])}"
        else:
            kind = "missing"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be one of {_list_of(str(context['expected']))}, not {_shown(value)}"
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        bound = context[limit]
        bound = f"{bound:g}" if isinstance(bound, float) else bound
        return f"{words} {bound}, not {_shown(value)}"
    if kind in _KINDS:
        return f"{_KINDS[kind]}, not {_shown(value)}"
    return f"{details['msg']}, got {_shown(value)}"


def _list_of(expected: str) -> str:
    return expected.replace("'", '"').replace(" or ", ", ")


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f'{text[:56]}…"'


def _unknown_field(name: str, section: type) -> str:
    known = list(fields_of(section))
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f'is no known field; did you mean "{near[0]}"?'
    return f"is no known field; known here are {', '.join(known)}"
