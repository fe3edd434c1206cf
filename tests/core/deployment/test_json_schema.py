"""The JSON Schema that editors get and the page that people read: both have every field, as prfaas takes it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.core.deployment.reference_tables import PAGE, sections, written

from prfaas.core.deployment.schema import json_schema

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_takes_every_example(validator: Draft202012Validator, path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "clusters" not in document:
        pytest.skip("no deployment file")
    assert [error.message for error in validator.iter_errors(document)] == []


@pytest.mark.parametrize(
    "place, value",
    [
        (("gateway", "port"), "8000"),
        (("gateway", "port"), None),
        (("gateway", "prot"), 8000),
        (("transfer", "keepalive_s"), 0.5),
        (("engine", "log_files"), 0),
        (("routing", "policy"), 7),
        (("clusters", 0, "kind"), "pdd"),
        (("clusters", 0, "instances", 0, "roles"), []),
        (("clusters", 0, "instances", 0, "cluster"), "east"),
        (("links", 0, "connections"), 65),
        (("security", "tenant_weights"), {"gold": 0}),
    ],
)
def test_it_refuses_what_prfaas_refuses(
    validator: Draft202012Validator, place: tuple[str | int, ...], value: Any
) -> None:
    document = yaml.safe_load((ROOT / "examples" / "local.yaml").read_text(encoding="utf-8"))
    *outer, last = place
    at = document
    for part in outer:
        at = at[part] if isinstance(part, int) else at.setdefault(part, {})
    at[last] = value
    (error,) = validator.iter_errors(document)
    assert list(error.absolute_path)[: len(outer)] == outer


def test_every_field_has_a_meaning(validator: Draft202012Validator) -> None:
    schema: Any = validator.schema
    sections = {"the file": schema, **schema["$defs"]}
    without = {
        f"{name}.{field}"
        for name, section in sections.items()
        for field, shown in section["properties"].items()
        if "description" not in shown
    }
    assert without == set()


def test_the_reference_page_has_every_field_as_it_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "run python -m tests.core.deployment.reference_tables"
    assert sorted(re.findall(r"<!-- fields of (\w+)", text)) == sorted(sections())
