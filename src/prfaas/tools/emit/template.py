"""Texts of emitted files: the templates of this folder, filled in by jinja2."""

from typing import Any

import jinja2
import yaml

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("prfaas.tools.emit"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.policies["json.dumps_kwargs"] = {}  # fields stay in their order

Fields = dict[str, Any]


def rendered(template: str, **values: Any) -> str:
    """`templates/TEMPLATE` with these values."""
    return _TEMPLATES.get_template(template).render(values)


def objects(template: str, **values: Any) -> list[Fields]:
    """The documents of a YAML template."""
    return list(yaml.load_all(rendered(template, **values), yaml.CSafeLoader))
