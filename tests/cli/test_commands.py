"""Commands as a user types them, with what they print and how they end."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas import __version__
from prfaas.cli import main as cli
from prfaas.cli.common import LogsAsked
from prfaas.core.deployment import load_deployment

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    # It would change the loggers of this process for all tests after.
    monkeypatch.setattr("prfaas.cli.common.LogsAsked.write", LogsAsked.settings)
    return tmp_path / "home"


@pytest.fixture
def dense_file(tmp_path: Path) -> Path:
    """A deployment whose model needs no making."""
    (tmp_path / "m").mkdir()
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "dense.yaml"
    text = EXAMPLE.read_text().replace("trained: words", "path: m")
    path.write_text(
        text.replace("port: 8000", f"port: {free_ports(1)[0]}\n  admin: {{port: {free_ports(1)[0]}}}")
    )
    return path


def gateway_port(path: Path) -> int:
    return load_deployment(path).gateway.port


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_every_command_has_help_with_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    overview = capsys.readouterr().out
    for command in (
        ["init"],
        ["emit", "systemd"],
        ["up"],
        ["serve"],
        ["engine"],
        ["key"],
        ["certs"],
        ["doctor"],
        ["demo"],
        ["pool", "start"],
        ["pool", "status"],
        ["pool", "clear"],
        ["pool", "verify"],
        ["model", "make"],
        ["monitoring", "scrape"],
        ["monitoring", "alerts"],
        ["monitoring", "grafana"],
    ):
        assert command[0] in overview
        assert run(monkeypatch, *command, "--help") == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"prfaas {' '.join(command).removesuffix(' start')}" in text
        assert "Example" in text


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['prfaas', '--help']\n"
        "import prfaas.cli.main as m\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "wings = {name for name in sys.modules if name.startswith('prfaas.') and name.split('.')[1] != 'cli'}\n"
        "print(sorted(wings | names & {'vllm', 'torch', 'aiohttp', 'pydantic', 'numpy', 'yaml', 'transformers', "
        "'rich', 'asyncio', 'logging'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    # Help says where pages are.
    assert done.stdout.splitlines()[-1] == "['prfaas.core', 'prfaas.core.shipped']"


def test_the_overview_has_whole_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    printed = capsys.readouterr().out
    text = " ".join(printed.partition("Run:")[2].split())
    assert "that disaggregation really happens. status Show" in text
    assert text.endswith(".") and "..." not in text and "(the paper's equation 2). profile" in text
    panels = re.findall(r"^(\w+):$", printed, re.MULTILINE)
    assert panels == ["Options", "Run", "Watch", "Decide", "Extend"]


@pytest.mark.parametrize("args", [("--help",), ("init", "--help"), ("emit", "kubernetes", "--help")])
def test_flags_have_no_type(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *args) == 0
    printed = capsys.readouterr().out
    assert "--help" in printed and "<bool>" not in printed


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prfaas", "--version"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == f"prfaas {__version__}\n"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"prfaas {__version__}\n"


def test_engine_prints_a_command_line_that_a_shell_understands(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert run(monkeypatch, "engine", dense_file, "home-decode-0", "--print") == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "env"
    assert run(monkeypatch, "engine", dense_file, "home-decode-0", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert words[-len(document["argv"]) :] == document["argv"]
    assert dict(word.split("=", 1) for word in words[1 : -len(document["argv"])]) == document["env"]
    assert not home.exists()


@pytest.mark.parametrize("command", [("engine", "x"), ("serve",), ("up",), ("key",)])
def test_a_bad_file_ends_with_one_sentence(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(EXAMPLE.read_text().replace("60 Mbit/s", "60 MB"))
    assert run(monkeypatch, command[0], bad, *command[1:]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"prfaas: {bad}:")
    assert captured.err.count("\n") == 1
    assert "links[0].bandwidth" in captured.err


def test_an_unknown_instance_is_named(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "engine", dense_file, "nobody") == 2
    assert "it has east-prefill-0, home-prefill-0, home-decode-0" in capsys.readouterr().err


def test_a_missing_vllm_is_one_sentence(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for args in (("engine", dense_file, "home-decode-0"), ("up", dense_file)):
        assert run(monkeypatch, *args) == 2
        assert capsys.readouterr().err.startswith("prfaas: vLLM is not installed in this environment; ")


def test_our_own_errors_are_not_swallowed(dense_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("prfaas.core.deployment.load_deployment", broken)
    monkeypatch.setattr(sys, "argv", ["prfaas", "key", str(dense_file)])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_key_is_made_once_and_private(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "key", dense_file) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert run(monkeypatch, "key", dense_file) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_serve_wants_the_key_of_a_deployment_on_several_machines(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense_file.write_text(
        dense_file.read_text().replace("127.0.0.1, http_port: 18100", "192.0.2.1, http_port: 18100")
    )
    assert run(monkeypatch, "serve", dense_file) == 2
    assert "copy it to this path on every machine" in capsys.readouterr().err


def test_a_taken_gateway_port_is_named_before_engines_start(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = load_deployment(dense_file).gateway
    for port, field in ((gateway.port, "gateway.port"), (gateway.admin.port, "gateway.admin.port")):
        with socket.create_server(("127.0.0.1", port)):
            for command in ("up", "serve"):
                assert run(monkeypatch, command, dense_file) == 2
                assert (
                    f"127.0.0.1:{port} is already in use; free it or change {field}\n"
                    in capsys.readouterr().err
                )


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        (
            "policy: no.such:Policy",
            'routing.policy: policy no.such:Policy: module "no.such" can\'t be imported',
        ),
        ("policy: math:Nothing", 'routing.policy: policy math:Nothing: module "math" has no class "Nothing"'),
        (
            "policy: fractions:Fraction",
            "routing.policy: policy fractions:Fraction is no policy: it must be a class",
        ),
        (
            "policy: tilted\n  params: {beta: -1}",
            "routing.params.beta: policy tilted takes for beta a number, at least",
        ),
    ],
)
def test_a_policy_that_can_not_be_is_said_before_engines_start(
    dense_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    routing: str,
    problem: str,
) -> None:
    text = dense_file.read_text()
    assert "policy: tilted" in text
    # So that a command which goes on ends at once.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("uvloop.run", lambda main: main.close())
    dense_file.write_text(text.replace("policy: tilted", routing))
    for command in ("up", "serve"):
        assert run(monkeypatch, command, dense_file) == 2
        error = capsys.readouterr().err
        assert problem in error and error.startswith(f"prfaas: {dense_file}:") and error.count("\n") == 1


def test_a_missing_token_is_one_sentence(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense_file.write_text(
        dense_file.read_text().replace("admin: {", "admin: {host: 0.0.0.0, token_file: token, ")
    )
    for command in ("up", "serve", "status"):
        assert run(monkeypatch, command, dense_file) == 2
        error = capsys.readouterr().err
        assert error.startswith("prfaas: token file ") and error.count("\n") == 1
        assert "openssl rand -hex 32" in error


def test_how_logs_are_written(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--log-format", "json", "--log-level", "debug")
    assert run(monkeypatch, "engine", dense_file, "home-decode-0", "--json", *options) == 0
    env = json.loads(capsys.readouterr().out)["env"]
    assert (env["PRFAAS_LOG_FORMAT"], env["PRFAAS_LOG_LEVEL"]) == ("json", "debug")
    for command in (("serve", dense_file), ("up", dense_file), ("engine", dense_file, "home-decode-0")):
        assert run(monkeypatch, *command, "--log-level", "loud") == 2
        assert (
            capsys.readouterr().err == 'prfaas: --log-level: "loud" is none of debug, info, warning, error\n'
        )


@pytest.mark.slow("starts processes, and waits for what they do")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_runs_until_a_signal(dense_file: Path, number: signal.Signals) -> None:
    port = gateway_port(dense_file)
    code = "from prfaas.cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(dense_file)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"ready: http://127.0.0.1:{port}/v1\n"
            process.send_signal(number)
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_a_pool_is_started_by_its_name(
    dense_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert run(monkeypatch, "pool", dense_file, "home-pool", "--print") == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[-2:] == [str(dense_file), "home-pool"]
    assert words[words.index("--state-dir") + 1] == str(home)
    assert "--keep-memory" not in words
    assert run(monkeypatch, "pool", "start", dense_file, "home-pool", "--print", "--keep-memory") == 0
    assert "--keep-memory" in shlex.split(capsys.readouterr().out)
    assert run(monkeypatch, "pool", dense_file, "home-decode-0") == 2
    assert 'has no pool "home-decode-0"; it has prfaas-east-pool, home-pool' in capsys.readouterr().err
    assert not home.exists()
