"""`prfaas emit`, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.cli import main as cli
from prfaas.core.deployment import load_deployment
from prfaas.core.shipped import example_path
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.secret_files import create_key, create_token

KINDS = ("systemd", "compose", "kubernetes")
EXAMPLE = example_path("two-datacenters")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_help_with_an_example(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "emit", kind, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: prfaas emit {kind} examples/two-datacenters.yaml -o" in text


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_said(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, "emit", kind, EXAMPLE, "-o", out, "--json") == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert sorted(files) == sorted(str(path) for path in out.rglob("*") if path.is_file())
    before = {path: Path(path).read_bytes() for path in files}
    assert run(monkeypatch, "emit", kind, EXAMPLE, "-o", out) == 0
    assert capsys.readouterr().out.splitlines() == files
    assert {path: Path(path).read_bytes() for path in files} == before


def test_no_secret_is_in_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = load_deployment(EXAMPLE)
    key = create_key(deployment.security.key_file)
    assert deployment.gateway.admin.token_file is not None
    create_token(deployment.gateway.admin.token_file)
    CertificateFolder(deployment).make()
    secrets = {key, key.hex().encode(), deployment.gateway.admin.token_file.read_bytes().strip()}
    for path in deployment.security.certificates.iterdir():
        secrets |= {line for line in path.read_bytes().splitlines() if len(line) > 20 and b"-" not in line}
    assert len(secrets) > 20
    for kind in KINDS:
        assert run(monkeypatch, "emit", kind, EXAMPLE, "-o", tmp_path / "out") == 0
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(secret in content for content in written for secret in secrets)


def test_the_script_makes_the_secrets_that_pods_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """With a kubectl that only writes down what it was asked."""
    deployment = load_deployment(EXAMPLE)
    create_key(deployment.security.key_file)
    assert deployment.gateway.admin.token_file is not None
    create_token(deployment.gateway.admin.token_file)
    CertificateFolder(deployment).make()
    assert run(monkeypatch, "emit", "kubernetes", EXAMPLE, "-o", tmp_path / "out") == 0
    tools = tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "log"
    stub = tools / "kubectl"
    stub.write_text(
        f'#!/bin/sh\nif [ "$1" = apply ]; then cat >/dev/null; exit 0; fi\n'
        f'file="${{7#*=}}"; file="${{file#*=}}"; test -r "$file" || exit 1; echo "$6 $7" >> {log}\n'
    )
    stub.chmod(0o755)
    for site, wanted in (
        ("east", ["key", "ca", "identity-east-0", "identity-east-1"]),
        (
            "home",
            [
                *("key", "ca", "identity-home-0", "identity-home-1", "identity-home-2"),
                *("identity-gateway", "identity-tools", "admin-token"),
            ],
        ),
    ):
        log.unlink(missing_ok=True)
        subprocess.run(
            [str(tmp_path / "out" / "overlays" / site / "create-secrets.sh")],
            env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PRFAAS_HOME": str(home)},
            check=True,
            timeout=60,
        )
        made = [line.split() for line in log.read_text().splitlines()]
        assert [name for name, _ in made] == [f"prfaas-{each}" for each in wanted]
        assert made[0][1] == "--from-file=key=key"
        assert made[2][1] == f"--from-file={wanted[2].removeprefix('identity-')}.pem=" + (
            f"certificates/{wanted[2].removeprefix('identity-')}.pem"
        )


def test_a_program_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, "emit", "systemd", EXAMPLE, "-o", out, "--program", "/usr/bin/prfaas") == 0
    text = (out / "home/gateway/prfaas-gateway.service").read_text()
    assert "ExecStart=/usr/bin/prfaas serve /etc/prfaas/deployment.yaml\n" in text
    capsys.readouterr()
    for bad in ("bin/prfaas", "/opt/a b/prfaas"):
        assert run(monkeypatch, "emit", "systemd", EXAMPLE, "-o", out, "--program", bad) == 2
        assert "give an absolute path without blanks" in capsys.readouterr().err


def test_a_folder_that_can_not_be_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "emit", "compose", EXAMPLE, "-o", tmp_path / "file") == 2
    error = capsys.readouterr().err
    assert "Not a directory" in error and error.count("\n") == 1


def test_what_kubernetes_can_not_do_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "emit", "kubernetes", example_path("local"), "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "is one machine alone" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
