"""Texts of emitted files: the templates of this folder, filled in by jinja2."""

import re
from typing import Any

import jinja2
import yaml


def yaml_scalar(text: str) -> str:
    """A text as YAML reads it back, also inside of braces."""
    plain = re.fullmatch(
        r"[A-Za-z/][A-Za-z0-9/._ -]*[A-Za-z0-9]|[0-9]+(\.[0-9]+)* ?[A-Za-z/]+|[0-9]+(\.[0-9]+){2,3}", text
    )
    if plain and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=10_000).strip()


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("prfaas.tools.emit"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["scalar"] = yaml_scalar
_TEMPLATES.policies["json.dumps_kwargs"] = {}  # fields stay in their order

Fields = dict[str, Any]


def rendered(template: str, **values: Any) -> str:
    """`templates/TEMPLATE` with these values."""
    return _TEMPLATES.get_template(template).render(values)


def objects(template: str, **values: Any) -> list[Fields]:
    """The documents of a YAML template; what is empty is none."""
    return [
        each for each in yaml.load_all(rendered(template, **values), yaml.CSafeLoader) if each is not None
    ]
