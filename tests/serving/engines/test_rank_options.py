"""Options and places of the ranks of a data-parallel group, as vLLM takes them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.ports import free_ports

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines.command import vllm_command
from prfaas.serving.engines.data_parallel import end_group_before
from prfaas.serving.engines.tiny import tiny_model

FILE = """
name: ranks
model: {served_name: m, path: MODEL, max_model_len: 4096}
clusters:
  - name: far
    kind: prfaas
    hardware: cpu
    instances:
      - {name: far-0, roles: [prefill], host: 127.0.0.1, http_port: 23000, kv_port: 23100}
  - name: home
    kind: pd
    hardware: cpu
    instances:
      - {name: home-0, roles: [decode], host: 127.0.0.1, http_port: 23001, kv_port: 23110, nixl_port: 23300,
         data_parallel: moe, expert_parallel: true}
      - {name: home-1, roles: [decode], host: 127.0.0.1, http_port: 23002, kv_port: 23120, nixl_port: 23301,
         data_parallel: moe, expert_parallel: true}
links:
  - {source: far, target: home, bandwidth: 1 Gbit/s, encryption: false}
routing: {threshold_tokens: 500}
engine: {kv_cache_gib: 0.5, staging: 64 MiB, local_transfer: nixl}
"""


def deployment(tmp_path: Path, *, http_port: int = 23001) -> Deployment:
    model = tiny_model("qwen3-next", tmp_path / "models")
    text = FILE.replace("MODEL", str(model)).replace("23001", str(http_port))
    (tmp_path / "file.yaml").write_text(text)
    return load_deployment(tmp_path / "file.yaml", state_dir=tmp_path / "state")


def value(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    made = deployment(tmp_path)
    for rank in (0, 1):
        argv = vllm_command(made, made.instance(f"home-{rank}")).argv
        told = [value(argv, f"--data-parallel-{what}") for what in ("size", "rank", "address", "rpc-port")]
        assert told == ["2", str(rank), "127.0.0.1", "23111"]
        assert "--enable-expert-parallel" in argv
    alone = vllm_command(made, made.instance("far-0")).argv
    assert not any(option.startswith(("--data-parallel", "--enable-expert")) for option in alone)


def test_vllm_s_shift_ends_where_nixl_is_looked_for(tmp_path: Path) -> None:
    made = deployment(tmp_path)
    for rank in (0, 1):
        instance = made.instance(f"home-{rank}")
        assert instance.nixl_port is not None
        given = vllm_command(made, instance).env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        assert int(given) + rank == instance.nixl_port


@pytest.mark.slow("vLLM is imported")
def test_vllm_s_shift_ends_where_events_are_looked_for(tmp_path: Path) -> None:
    publisher = pytest.importorskip("vllm.distributed.kv_events").ZmqEventPublisher
    made = deployment(tmp_path)
    for rank in (0, 1):
        instance = made.instance(f"home-{rank}")
        endpoint = made.events_endpoint(instance)
        config = json.loads(value(vllm_command(made, instance).argv, "--kv-events-config"))
        bound = [
            publisher.offset_endpoint_port(config[name], rank) for name in ("endpoint", "replay_endpoint")
        ]
        assert bound == [endpoint.publish, endpoint.replay]


def test_a_rank_that_starts_makes_those_step_that_have_lost_it(tmp_path: Path) -> None:
    asked: list[tuple[str, object]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((self.path, json.loads(body or "null")))
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

    (port,) = free_ports(1)
    made = deployment(tmp_path, http_port=port)
    # Nothing of a former group is there.
    end_group_before(made, made.instance("home-1"), started=["home-1"])
    with HTTPServer(("127.0.0.1", port), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            end_group_before(made, made.instance("far-0"), started=["far-0"])
            end_group_before(made, made.instance("home-1"), started=["home-0", "home-1"])
            assert asked == []
            end_group_before(made, made.instance("home-1"), started=["home-1"])
        finally:
            server.shutdown()
    assert asked == [
        ("/health", None),
        ("/v1/completions", {"model": "m", "prompt": [0], "max_tokens": 1}),
    ]
