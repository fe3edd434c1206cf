"""Files that no person writes: each gives one short line that names the field, and nothing else goes wrong."""

from pathlib import Path

import pytest

from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.shipped import example_path

TEXT = example_path("two-datacenters.yaml").read_text(encoding="utf-8")
LONG = "x" * 100_000


def said(folder: Path, content: bytes | str) -> str:
    path = folder / "deployment.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DeploymentError) as raised:
        load_deployment(path, state_dir=folder)
    text = str(raised.value).removeprefix(f"{path}")
    assert text.isprintable() and len(text) < 500, text
    return text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x00", "is no valid YAML"),
        (b"a: \x01", "is no valid YAML"),
        (b"\xff\xfe\xff", "is no text in UTF-8"),
        (b"a: &a [*a]", "nests or repeats too much"),
        (b"a: !!python/object:os.system x", "is no valid YAML"),
        (b"[" * 600, "nests or repeats too much"),
        (b"a: 2020-13-45", ":1: a: looks like a date or a number, and is none; put it into quotes"),
        (b"a: " + b"9" * 5000, ":1: a: looks like a date or a number, and is none; put it into quotes"),
        (b"a: !!timestamp x", ":1: a: looks like a date or a number, and is none; put it into quotes"),
        (b'a: !!int ""', ":1: a: looks like a date or a number, and is none; put it into quotes"),
        (b"a: !!bool x", ":1: a: looks like a date or a number, and is none; put it into quotes"),
        (b'"\\ud800": 1', "is no valid YAML"),
        (b"- a", ':1: must be a mapping of fields ("name: …"'),
        (f"? {LONG}\n: 1\n{TEXT}", "is no known field"),
        (f'"a\\nb": 1\n{TEXT}', "is no known field"),
    ],
    ids=[
        *("nul", "control", "binary", "loop", "python", "deep", "date", "digits", "no-date", "no-number"),
        *("no-flag", "surrogate", "list", "long-name", "line"),
    ],
)
def test_what_is_no_deployment_at_all(tmp_path: Path, content: bytes | str, expected: str) -> None:
    assert expected in said(tmp_path, content)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("name", '"a\\nb"', "name: must be letters, digits"),
        ("name", LONG, 'not "xxxx'),
        ("  served_name", '"a\\nb"', "model.served_name: must be one line of printable characters"),
        ("  served_name", '"  "', "model.served_name: must not be empty"),
        ("  served_name", LONG, "model.served_name: must have at most 4096 characters, not 100000"),
        ("  path", '"/m\\0"', "model.path: must be one line of printable characters"),
        ("  max_model_len", "1" + "0" * 30, "model.max_model_len: must be at most 2147483647, not 1000"),
        ("bandwidth", "1" + "0" * 400, "is no bandwidth; write for example"),
        ("bandwidth", "1.0e+308", "links[0].bandwidth: must be at most 1000 Tbit/s"),
        ("bandwidth", LONG, "is no bandwidth; write for example"),
    ],
)
def test_values_that_no_machine_could_use(tmp_path: Path, field: str, value: str, expected: str) -> None:
    if field == "bandwidth":
        text = TEXT.replace("bandwidth: 40 Gbit/s", f"bandwidth: {value}", 1)
    else:
        lines = TEXT.splitlines()
        place = next(number for number, line in enumerate(lines) if line.startswith(f"{field}:"))
        lines[place] = f"{field}: {value}"
        text = "\n".join(lines)
    assert expected in said(tmp_path, text)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (f"engine: {{staging: 1{'0' * 30}}}", "engine.staging: must be at most 1125899906842624, not 1000"),
        (f"engine: {{staging: 1{'0' * 400}}}", "is no size; write for example"),
        ('engine: {extra_args: ["a\\0"]}', "engine.extra_args[0]: must not have a NUL character"),
        ('engine: {env: {A: "a\\0"}}', "engine.env.A: must not have a NUL character"),
        ("transfer: {keepalive_s: 40000}", "transfer.keepalive_s: must be at most 32767, not 40000"),
        ("transfer: {user_timeout_s: 1.0e+9}", "transfer.user_timeout_s: must be at most 32767, not 1"),
        ("transfer: {lease_s: 1.0e+308}", "transfer.lease_s: must be at most 1e+09, not 1e+308"),
        ("control: {silence_s: .inf}", "control.silence_s: must be a finite number"),
        ("control: {silence_s: .nan}", "control.silence_s: must be a finite number"),
        (f"control: {{silence_s: 1{'0' * 400}}}", "control.silence_s: must be"),
    ],
)
def test_sections_that_no_machine_could_use(tmp_path: Path, section: str, expected: str) -> None:
    assert expected in said(tmp_path, f"{section}\n{TEXT}")
