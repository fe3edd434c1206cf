"""`prfaas doctor` against real KV receivers, a server that speaks as much HTTP as it asks for, and real routes."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from prfaas import __version__
from prfaas.cli import main as cli
from prfaas.core.deployment import AdminConfig, Deployment, load_deployment
from prfaas.core.route_header import RouteHeader
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.engines.preparation import ensure_certificates, ensure_key
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.options import Peer
from prfaas.tools.doctor import (
    check_disaggregation,
    check_engines,
    check_gateway,
    check_model,
    expected_route,
    judge_route,
)
from prfaas.tools.finding import Finding
from prfaas.tools.process_facts import (
    ProcessFacts,
    check_clocks,
    check_descriptors,
    check_versions,
    process_facts,
)
from prfaas.tools.security_facts import check_certificates, check_key

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"


class NoLayout:
    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [num_tokens - skip_tokens]


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return load_deployment(EXAMPLE, state_dir=tmp_path)


def problems(findings: Sequence[Finding]) -> dict[str, str]:
    assert all((finding.mend is not None) == (finding.level == "problem") for finding in findings)
    return {finding.subject: finding.text for finding in findings if finding.level == "problem"}


@asynccontextmanager
async def served(routes: dict[str, Callable[[web.Request], web.Response]]) -> AsyncIterator[int]:
    async def answer(request: web.Request) -> web.Response:
        if request.path not in routes:
            raise web.HTTPNotFound
        return routes[request.path](request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def vllm_routes(
    version: str = "0.32.0", name: str = "words", length: int = 32768
) -> dict[str, Callable[[web.Request], web.Response]]:
    return {
        "/health": lambda _: web.Response(),
        "/version": lambda _: web.json_response({"version": version}),
        "/v1/models": lambda _: web.json_response({"data": [{"id": name, "max_model_len": length}]}),
    }


def with_ports(deployment: Deployment, http_ports: Sequence[int], kv_ports: Sequence[int]) -> Deployment:
    ports = iter(zip(http_ports, kv_ports, strict=True))
    clusters = []
    for cluster in deployment.clusters:
        moved = []
        for instance in cluster.instances:
            http_port, kv_port = next(ports)
            moved.append(replace(instance, http_port=http_port, kv_port=kv_port))
        clusters.append(replace(cluster, instances=tuple(moved)))
    return replace(deployment, clusters=tuple(clusters))


@pytest.fixture
def receivers(deployment: Deployment) -> Iterator[list[Receiver]]:
    """A real receiver per instance, with the deployment's key."""
    ensure_key(deployment)
    key = load_key(deployment.security.key_file)
    with ExitStack() as stack:
        made = []
        for instance in deployment.instances:
            receiver = Receiver(
                name=f"{instance.name}/0",
                key=key,
                host="127.0.0.1",
                port=0,
                arena=StagingArena(1 << 20),
                layout=NoLayout(),
                fingerprint={},
            )
            receiver.start()
            stack.callback(receiver.close)
            made.append(receiver)
        yield made


def ask_engines(
    deployment: Deployment,
    receivers: Sequence[Receiver],
    monkeypatch: pytest.MonkeyPatch,
    *routes: dict[str, Callable[[web.Request], web.Response]],
) -> list[Finding]:
    monkeypatch.setattr("prfaas.tools.doctor._SETTLE_S", 0.1)

    async def ask() -> list[Finding]:
        async with served(routes[0]) as a, served(routes[1]) as b, served(routes[2]) as c:
            moved = with_ports(deployment, (a, b, c), [receiver.port for receiver in receivers])
            async with aiohttp.ClientSession() as session:
                return await check_engines(moved, session)

    return asyncio.run(ask())


def test_healthy_engines_whose_producers_are_not_connected(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = ask_engines(deployment, receivers, monkeypatch, vllm_routes(), vllm_routes(), vllm_routes())
    assert problems(findings) == {
        "KV port home-decode-0/0": "has 0 of 8 connections from east-prefill-0, home-prefill-0"
    }
    assert "KV port east-prefill-0/0" in {finding.subject for finding in findings}


def test_a_nixl_port_is_asked_for(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        open_port, closed_port = (each.getsockname()[1] for each in (listening, closed))
        closed.close()
        far, home = deployment.clusters
        ports = zip(home.instances, (open_port, closed_port), strict=True)
        instances = tuple(replace(each, nixl_port=port) for each, port in ports)
        asked = replace(deployment, clusters=(far, replace(home, instances=instances)))
        routes = (vllm_routes(), vllm_routes(), vllm_routes())
        findings = ask_engines(asked, receivers, monkeypatch, *routes)
    found = problems(findings)
    assert found["NIXL port home-decode-0"] == f"nothing answers at 127.0.0.1:{closed_port}"
    told = {finding.subject: finding.text for finding in findings}
    assert told["NIXL port home-prefill-0"] == f"listens at 127.0.0.1:{open_port}"
    assert "NIXL port home-prefill-0" not in found and "NIXL port east-prefill-0" not in told


def test_a_rejection_is_quoted(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = load_key(deployment.security.key_file)
    target = next(r for r in receivers if r.name == "home-decode-0/0")
    peer = Peer(target.name, "127.0.0.1", target.port, "link", 1, None)
    sender = Sender(
        name="east-prefill-0/0", key=key, peers={target.name: peer}, fingerprint={"block_tokens": "32"}
    )
    east = next(r for r in receivers if r.name == "east-prefill-0/0")
    east._sender = sender
    sender.start()
    try:
        deadline_s = time.monotonic() + 60
        while not sender.telemetry()["rejected"] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        findings = ask_engines(deployment, receivers, monkeypatch, *[vllm_routes()] * 3)
    finally:
        sender.close()
    assert problems(findings)["KV of east-prefill-0/0 for home-decode-0/0"] == (
        "KV layout differs in 'block_tokens': east-prefill-0/0 has '32', home-decode-0/0 has None"
    )


def test_engines_of_other_kinds(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = ask_engines(
        deployment,
        receivers,
        monkeypatch,
        vllm_routes("0.31.9"),
        vllm_routes(name="other"),
        vllm_routes(length=10),
    )
    found = problems(findings)
    assert (
        found["engine east-prefill-0"] == "runs vLLM 0.31.9; the connector is checked against 0.32 and 0.33"
    )
    assert found["engine home-prefill-0"] == "serves other, not words"
    assert found["engine home-decode-0"] == "takes 10 tokens, not 32768 (model.max_model_len)"
    assert found["versions"] == "engines run different versions of vLLM: 0.31.9, 0.32.0"


def test_ports_that_something_else_uses(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_health = {"/health": lambda _: web.Response()}
    findings = ask_engines(
        deployment, receivers, monkeypatch, {}, only_health, {"/health": lambda _: web.Response(status=503)}
    )
    found = problems(findings)
    assert found["engine east-prefill-0"].endswith("answers /health with 404")
    assert found["engine home-prefill-0"] == "does not list its models"
    assert found["engine home-decode-0"].endswith("answers /health with 503")


def test_stand_ins_are_known(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each where the file wants it; elsewhere it is as wrong as any other server."""
    home = deployment.clusters[1]
    stand_ins = tuple(replace(instance, is_stand_in=True) for instance in home.instances)
    home = replace(home, hardware="synthetic", instances=stand_ins)
    mixed = replace(deployment, clusters=(deployment.clusters[0], home))
    stand_in = vllm_routes("prfaas-synthetic 0.1.0")
    findings = ask_engines(mixed, receivers, monkeypatch, vllm_routes(), stand_in, vllm_routes())
    found = problems(findings)
    assert found["engine home-decode-0"] == "is 0.32.0, and the file wants a synthetic engine"
    assert "engine home-prefill-0" not in found and "versions" not in found
    # One connection inside of a cluster of stand-ins, four from the other one.
    assert found["KV port home-decode-0/0"] == "has 0 of 5 connections from east-prefill-0, home-prefill-0"
    found = problems(ask_engines(deployment, receivers, monkeypatch, stand_in, *[vllm_routes()] * 2))
    assert found["engine east-prefill-0"] == "is prfaas-synthetic 0.1.0, and the file wants vLLM"


def test_a_key_that_is_gone_while_engines_run(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prfaas engine` would make another one, which shuts the new engine out."""
    deployment.security.key_file.unlink()
    found = problems(ask_engines(deployment, receivers, monkeypatch, *[vllm_routes()] * 3))
    assert f"{deployment.security.key_file} is gone" in found["key"]
    assert check_key(deployment).level == "ok"


def test_processes_tell_their_clock_descriptors_and_version() -> None:
    text = "process_open_fds 900.0\nprocess_max_fds 1024.0\nprocess_max_fds_created 1\n"

    async def pieces() -> AsyncIterator[bytes]:
        for line in text.splitlines(keepends=True):
            yield line.encode()
            await asyncio.sleep(0.01)

    def metrics(_request: web.Request) -> web.Response:
        # As servers write what is long.
        return web.Response(body=pieces(), headers={"Date": "Sun, 22 Nov 2026 12:00:00 GMT"})

    async def ask() -> tuple[ProcessFacts, ProcessFacts]:
        async with served({"/metrics": metrics}) as port, aiohttp.ClientSession() as session:
            told = await process_facts(
                session, "engine a", f"http://127.0.0.1:{port}", now_s=lambda: 1795348800.0 - 60
            )
            return told, await process_facts(session, "engine b", "http://127.0.0.1:9", version="1")

    told, silent = asyncio.run(ask())
    assert told == ProcessFacts("engine a", 60.5, 900, 1024, None)
    assert silent == ProcessFacts("engine b", None, None, None, "1")
    assert problems(check_descriptors([told, silent])) == {
        "file descriptors": "engine a has 900 of 1,024 open"
    }


def test_clocks_that_break_tickets_are_named_with_both_values() -> None:
    now_s = 1795348800.0
    gateway = ProcessFacts("the gateway", ahead_s=-100.0)
    near, ahead = ProcessFacts("engine a", 1000.0), ProcessFacts("engine b", 1700.0)
    (fine,) = check_clocks([near, ProcessFacts("engine c")], gateway, now_s)
    assert (fine.level, fine.text) == ("ok", "engines are within 1100 s of the gateway")
    (found,) = check_clocks([near, ahead], gateway, now_s)
    assert found.text == (
        "engine b says 2026-11-22 12:28:20+00:00, the gateway says 2026-11-22 11:58:20+00:00: "
        "1800 s ahead, and tickets are good for 1800 s by the clock of the gateway"
    )
    # Without a gateway this machine's clock is all there is.
    (found,) = check_clocks([ProcessFacts("engine b", -1300.0)], ProcessFacts("the gateway"), now_s)
    assert "this machine says 2026-11-22 12:00:00+00:00: 1300 s behind" in found.text
    assert check_clocks([], gateway, now_s) == []


def test_limits_and_versions() -> None:
    low = ProcessFacts("engine a", open_descriptors=10, max_descriptors=1024, prfaas_version="0.0.1")
    fine = ProcessFacts("engine b", open_descriptors=10, max_descriptors=65536, prfaas_version=__version__)
    assert problems(check_descriptors([low, fine])) == {
        "file descriptors": "engine a may have only 1,024; every stream and transfer takes one"
    }
    assert [each.level for each in (*check_descriptors([fine]), *check_versions([fine]))] == ["ok", "ok"]
    assert problems(check_versions([low, fine])) == {
        "versions": f"engine a runs prfaas 0.0.1, here it is {__version__}"
    }
    assert check_versions([ProcessFacts("engine c")]) == []


def test_a_kv_port_with_another_key(
    deployment: Deployment, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.security.key_file.unlink()
    ensure_key(deployment)
    found = problems(ask_engines(deployment, receivers, monkeypatch, *[vllm_routes()] * 3))
    assert all(
        "does not have this deployment's key" in found[f"KV port {i.name}/0"] for i in deployment.instances
    )


def test_nothing_there(deployment: Deployment) -> None:
    async def ask() -> list[Finding]:
        moved = with_ports(deployment, (1, 2, 3), (4, 5, 6))
        moved = replace(moved, gateway=replace(moved.gateway, port=7))
        async with aiohttp.ClientSession() as session:
            return [*await check_engines(moved, session), await check_gateway(moved, session)]

    findings = asyncio.run(ask())
    assert [finding.level for finding in findings] == ["problem"] * 4
    assert findings[0].mend == f"start it on its machine: prfaas engine {EXAMPLE} east-prefill-0"


def test_files(deployment: Deployment, tmp_path: Path) -> None:
    assert check_model(deployment).level == check_key(deployment).level == "ok"
    ensure_key(deployment)
    deployment.security.key_file.chmod(0o644)
    finding = check_key(deployment)
    assert finding.level == "problem"
    assert "others can read it" in finding.text
    assert str(finding.mend).startswith("chmod 600 ")
    deployment.model.path.mkdir(parents=True)
    finding = check_model(deployment)
    assert (finding.level, finding.mend) == ("problem", f"prfaas model fetch {deployment.path}")
    (deployment.model.path / "config.json").write_text(json.dumps(tiny_config("qwen3-next")))
    assert check_model(deployment).level == "ok"
    other = replace(deployment, model=replace(deployment.model, kv_cache_dtype="fp8_ds_mla"))
    assert check_model(other).mend == f"name another model.kv_cache_dtype in {EXAMPLE}"
    first, *others = deployment.clusters
    own = replace(deployment, clusters=(replace(first, kv_cache_dtype="fp8_ds_mla"), *others))
    assert check_model(own).mend == f"name another clusters[{first.name}].kv_cache_dtype in {EXAMPLE}"
    unlike = replace(deployment, clusters=(replace(first, kv_cache_dtype="fp8"), *others))
    assert check_model(unlike).text.count("GDN") == 2 == 2 * check_model(deployment).text.count("GDN")
    elsewhere = replace(
        deployment, model=replace(deployment.model, trained=None, tiny=None, path=tmp_path / "none")
    )
    assert "model.path" in str(check_model(elsewhere).mend)


def test_certificates(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check_certificates(deployment)
    assert finding.level == "ok" and "will be made in" in finding.text
    ensure_certificates(deployment, ["home-decode-0"])
    (finding,) = check_certificates(deployment)
    # The gateway and the tools need none here: nothing leaves the machine but what goes over the link.
    assert finding.level == "ok" and finding.text.startswith("5 in ")
    own = deployment.security.identity_file("home-decode-0")
    content = own.read_bytes()
    own.unlink()
    (finding,) = check_certificates(deployment)
    assert finding.level == "problem" and "home-decode-0 has no certificate" in finding.text
    assert "prfaas certs" in str(finding.mend)
    own.write_bytes(content)
    own.chmod(0o600)
    for days, text in (
        (340, "home-decode-0 has one that ends on"),
        (370, "that expired on"),
        (3400, "the CA ends on"),
    ):
        now = datetime.now(UTC) + timedelta(days=days)
        monkeypatch.setattr("prfaas.serving.issuing.now", lambda now=now: now)
        assert any(text in each.text for each in check_certificates(deployment) if each.level == "problem"), (
            days
        )
    monkeypatch.undo()
    deployment.security.ca_file.write_text("")
    (finding,) = check_certificates(deployment)
    assert finding.level == "problem" and "holds no certificate" in finding.text


def test_a_machine_needs_the_certificates_of_what_runs_there(tmp_path: Path) -> None:
    file = tmp_path / "spread.yaml"
    file.write_text(EXAMPLE.read_text().replace("host: 127.0.0.1, http_port", "host: 10.0.0.9, http_port"))
    deployment = load_deployment(file, state_dir=tmp_path)
    (finding,) = check_certificates(deployment)
    assert finding.level == "problem" and "ca.crt can't be read" in finding.text
    CertificateFolder(deployment).make()
    deployment.security.identity_file("home-decode-0").unlink()
    (finding,) = check_certificates(deployment)
    assert finding.level == "ok"
    deployment.security.identity_file("tools").unlink()
    (finding,) = check_certificates(deployment)
    assert finding.level == "problem" and "tools has no certificate" in finding.text


def test_nothing_is_said_of_certificates_that_nobody_needs(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(
        EXAMPLE.read_text().replace("    connections: 4\n", "    connections: 4\n    encryption: false\n")
    )
    assert check_certificates(load_deployment(file, state_dir=tmp_path)) == []


OFFLOAD = "offload; prefill=east-prefill-0; decode=home-decode-0; uncached=4064; cached=0; bytes=1048576; reason=long"


@pytest.mark.parametrize(
    ("header", "level", "text"),
    [
        (OFFLOAD, "ok", "1.0 MiB of KVCache moved"),
        (
            OFFLOAD.replace("bytes=1048576", "bytes=0"),
            "problem",
            "the decode engine computed everything again",
        ),
        (
            "local; prefill=home-prefill-0; decode=home-decode-0; bytes=9; fallback=prefill_failed; reason=long",
            "problem",
            "route local and not offload, because: prefill_failed",
        ),
        ("local; prefill=home-decode-0; decode=home-decode-0; reason=down", "problem", "because: down"),
    ],
)
def test_what_a_probe_shows(deployment: Deployment, header: str, level: str, text: str) -> None:
    by_length = replace(deployment, routing=replace(deployment.routing, policy="paper"))
    finding = judge_route(by_length, 4064, 4000.0, RouteHeader.parse(header))
    assert finding.level == level
    assert text in finding.text


@pytest.mark.parametrize(
    ("policy", "over", "under"),
    [
        ("paper", "offload", "local"),
        ("static_threshold", "offload", "local"),
        ("local_only", "local", "local"),
        ("offload_all", "offload", "offload"),
        ("tilted", None, None),
    ],
)
def test_where_a_probe_should_go(
    deployment: Deployment, policy: str, over: str | None, under: str | None
) -> None:
    moved = replace(deployment, routing=replace(deployment.routing, policy=policy))
    assert expected_route(moved, 4064, 4000.0) == over
    assert expected_route(moved, 4000, 4000.0) == under
    assert expected_route(replace(moved, links=()), 4064, 4000.0) == "local"


def test_policy_tilted_offloads_what_is_clearly_long(deployment: Deployment) -> None:
    tilted = replace(deployment, routing=replace(deployment.routing, policy="tilted"))
    assert expected_route(tilted, 6000, 4000.0) == "offload"


def test_the_probe_is_over_the_threshold_and_unseen(deployment: Deployment) -> None:
    asked: list[dict[str, object]] = []

    def complete(request: web.Request) -> web.Response:
        return web.json_response({}, headers={"x-prfaas-route": OFFLOAD})

    async def state(_request: web.Request) -> web.Response:
        return web.json_response({"clusters": {"home": {"threshold_tokens": 3000}}})

    async def ask() -> list[Finding]:
        async def record(request: web.Request) -> web.Response:
            asked.append(await request.json())
            return complete(request)

        app = web.Application()
        app.router.add_post("/v1/completions", record)
        app.router.add_get("/prfaas/state", state)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            port = runner.addresses[0][1]
            gateway = replace(deployment.gateway, port=port, admin=AdminConfig("127.0.0.1", port))
            async with aiohttp.ClientSession() as session:
                return [
                    await check_disaggregation(replace(deployment, gateway=gateway), session)
                    for _ in range(2)
                ]
        finally:
            await runner.cleanup()

    findings = asyncio.run(ask())
    assert [finding.level for finding in findings] == ["ok", "ok"]
    first, second = (body["prompt"] for body in asked)
    assert isinstance(first, list)
    assert isinstance(second, list)
    # What counts is where the threshold is now, not where the file lets it start.
    assert len(first) == len(second) == 4500
    assert first[:8] != second[:8]


def test_a_gateway_that_refuses_the_probe(deployment: Deployment) -> None:
    async def ask() -> Finding:
        async with served({"/v1/completions": lambda _: web.Response(status=503, text="no engine")}) as port:
            gateway = replace(deployment.gateway, port=port)
            async with aiohttp.ClientSession() as session:
                return await check_disaggregation(replace(deployment, gateway=gateway), session)

    finding = asyncio.run(ask())
    assert finding.level == "problem"
    assert "status 503: no engine" in finding.text


def test_a_bad_file_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\n")
    for arguments in (["--json"], []):
        monkeypatch.setattr(sys, "argv", ["prfaas", "doctor", str(bad), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 1
        out = capsys.readouterr().out
        if arguments:
            document = json.loads(out)
            assert document["ok"] is False
            assert document["findings"][0]["subject"] == "file"
            assert document["findings"][0]["mend"]
        else:
            assert out.startswith("problem  file: ")
            assert "→ correct the file" in out
