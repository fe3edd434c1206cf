"""The tables of docs/reference/deployment-file.md, from the fields themselves.

    python -m tests.core.deployment.reference_tables

writes them again. A table stands below a mark, `<!-- fields of SECTION -->`; the rest of the page is by hand.
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from prfaas.core.deployment.schema import DeploymentFile, json_schema
from prfaas.core.deployment.section import FieldFacts, docs_of, fields_of
from prfaas.core.units import format_bytes

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "deployment-file.md"
_PORTS = ("port", "http_port", "kv_port", "nixl_port")
_TABLE = re.compile(r"<!-- fields of (\w+)(?: as ([\w.]+))? -->\n\n(?:\|.*\n)*")


def sections() -> dict[str, type]:
    """All sections of the file by the names of their classes."""
    return {each.__name__: each for each in _below(DeploymentFile)}


def _below(section: type) -> Iterator[type]:
    yield section
    for field in fields_of(section).values():
        for each in field.sections:
            yield from _below(each)


def written(text: str) -> str:
    """The page with its tables as the fields are now."""

    def table(mark: re.Match[str]) -> str:
        section, prefix = sections()[mark[1]], "" if mark[2] is None else f"{mark[2]}."
        docs, bounds = docs_of(section), _bounds(mark[1])
        rows = [
            f"| `{prefix}{field.name_in_file}` | {_default(field)} | "
            f"{docs[field.name].rstrip('.')}{bounds[field.name_in_file]} |\n"
            for field in fields_of(section).values()
            if field.name != "distribution"
        ]
        first = mark[0].partition("\n")[0]
        return f"{first}\n\n| field | default | meaning |\n|---|---|---|\n{''.join(rows)}"

    return _TABLE.sub(table, text)


def _bounds(section: str) -> dict[str, str]:
    """What values each field may have, where that is not plain from its kind."""
    schema = json_schema()
    found = {}
    for name, shown in {section: schema, **schema["$defs"]}[section]["properties"].items():
        least, most = shown.get("minimum"), shown.get("maximum")
        if "enum" in shown:
            found[name] = f" ({', '.join(f'`{each}`' for each in shown['enum'])})"
        elif least is not None and most is not None and name not in _PORTS:
            found[name] = f" ({least:g} to {most:g})"
        else:
            found[name] = ""
    return found


def _default(field: FieldFacts) -> str:
    """Empty where the file must have the field; "–" where nothing takes its place."""
    value: Any = field.default
    if value is MISSING:
        return ""
    if field.sections and value is not None:
        return "as below"
    if isinstance(value, bool):
        return "true" if value else "false"
    # What no file can say stands for what is left out.
    if value is None or (not value and (not isinstance(value, int | float) or field.name in _PORTS)):
        return "–"
    if field.name.endswith("_bytes") and value:
        return format_bytes(value).replace(".0 ", " ")
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
