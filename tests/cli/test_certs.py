"""`prfaas certs`."""

import json
from pathlib import Path

import pytest

from prfaas.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"
INSTANCES = ["east-prefill-0", "home-prefill-0", "home-decode-0"]
NAMES = [*INSTANCES, "prfaas-east-pool", "home-pool", "gateway", "tools"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "local" / "certificates"


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    """The example on two machines."""
    file = tmp_path / "spread.yaml"
    file.write_text(
        EXAMPLE.read_text().replace("host: 127.0.0.1, http_port: 18100", "host: 10.0.0.9, http_port: 18100")
    )
    return file


def run(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["prfaas", "certs", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def test_they_are_made_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, EXAMPLE, "--days", "90", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["folder"] == str(home)
    assert [each["name"] for each in first["certificates"]] == NAMES
    assert all(each["new"] and each["problem"] is None for each in first["certificates"])
    assert first["next"] is None
    assert run(monkeypatch, EXAMPLE, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert not any(each.pop("new") for each in again["certificates"])
    assert [each["expires"] for each in again["certificates"]] == [
        each["expires"] for each in first["certificates"]
    ]
    assert run(monkeypatch, EXAMPLE) == 0
    shown = capsys.readouterr()
    assert shown.out.count("good") == len(NAMES) + 1
    assert "CA, trusted, issues" in shown.out
    assert shown.err == ""


def test_showing_changes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, EXAMPLE, "--show") == 2
    assert "ca.crt can't be read" in capsys.readouterr().err
    assert not home.exists()
    assert run(monkeypatch, EXAMPLE) == 0
    (home / "gateway.pem").unlink()
    capsys.readouterr()
    assert run(monkeypatch, EXAMPLE, "--show") == 1
    assert "gateway has no certificate" in " ".join(capsys.readouterr().out.split())
    assert not (home / "gateway.pem").exists()


def test_the_steps_of_a_change_of_the_ca(
    home: Path, spread: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    followings = []
    for step in ((), ("--rotate-ca",), ("--rotate",), ("--retire-ca",), ()):
        assert run(monkeypatch, spread, *step, "--json") == 0
        followings.append(json.loads(capsys.readouterr().out)["next"])
    files = f"copy {home / 'ca.crt'} and each new file to the machine where its owner runs"
    assert followings == [
        files,
        f"copy {home / 'ca.crt'} to every machine, then: prfaas certs {spread} --rotate",
        f"{files}, then: prfaas certs {spread} --retire-ca",
        f"copy {home / 'ca.crt'} to every machine",
        None,
    ]


@pytest.mark.parametrize(
    "options, text",
    [
        (("--rotate", "--show"), "--rotate and --show are two steps"),
        (("--days", "9", "--show"), "--days is for certificates that are made, and --show makes none"),
        (("--days", "9999"), "shorten --days"),
        (("--retire-ca",), "ca.crt can't be read"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    text: str,
) -> None:
    assert run(monkeypatch, EXAMPLE, *options) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
