"""A reload by a signal, as the log of the gateway has it."""

import asyncio
import logging
from pathlib import Path

import pytest

from prfaas.cli.running import reload_and_tell
from prfaas.core.deployment import load_deployment
from prfaas.serving.reloading import Reloader

TEXT = """
name: small
model: {served_name: m, tiny: qwen3-next, max_model_len: 4096}
clusters:
  - name: home
    kind: pd
    hardware: h20
    instances:
      - {name: p, roles: [prefill], host: 127.0.0.1, http_port: 8100, kv_port: 8200}
      - {name: d, roles: [decode], host: 127.0.0.1, http_port: 8101, kv_port: 8201}
"""


class Mistake:
    """A follower that can't follow."""

    def follow(self, _before: object, _now: object) -> None:
        raise KeyError("secret words of a request")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(TEXT)
    return path


def told(
    reloader: Reloader, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """All that a reload says, in the log or beside it."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="prfaas"):
        asyncio.run(reload_and_tell(reloader))
    return [*caplog.messages, *capsys.readouterr().err.splitlines()]


def test_each_change_is_said_once(
    file: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    reloader = Reloader(load_deployment(file, state_dir=file.parent))
    file.write_text(TEXT + "gateway: {shadow: 0.5, route_header: full}\n")
    assert told(reloader, caplog, capsys) == [
        'reloaded: gateway.route_header is now "full"; it was "short"',
        "reloaded: gateway.shadow is now 0.5; it was 0",
    ]
    assert told(reloader, caplog, capsys) == ["reloaded: nothing has changed"]


def test_what_is_refused_or_goes_wrong_is_said_once(
    file: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    reloader = Reloader(load_deployment(file, state_dir=file.parent))
    file.write_text(TEXT.replace("kind: pd", "kind: pp"))
    (said,) = told(reloader, caplog, capsys)
    assert said.startswith(f"not reloaded: {file}:6: clusters[0].kind: must be one of")
    reloader.follow(Mistake())
    file.write_text(TEXT + "gateway: {shadow: 0.5}\n")
    with pytest.raises(KeyError):
        asyncio.run(reloader.reload())
    (said,) = told(reloader, caplog, capsys)
    assert said == "not reloaded, which is a fault of prfaas"
