"""What `prfaas doctor` finds at the engines: are they there, of one kind, and do their KV ports know each other."""

import asyncio
import re

import aiohttp

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.transport.observer import Observer
from prfaas.serving.transport.ticket import KeyFileError, load_key
from prfaas.tools.doctor.files import Finding, ok, problem
from prfaas.tools.endpoint import get_json, served_models

OLDEST_VLLM = (0, 32)

_TIMEOUT_S = 10.0
_KV_TIMEOUT_S = 6.0
_SETTLE_S = 3.0


async def check_engines(deployment: Deployment, session: aiohttp.ClientSession) -> list[Finding]:
    """All checks of all engines, in the order of the file."""
    per_engine = await asyncio.gather(
        *(_check_engine(deployment, instance, session) for instance in deployment.instances)
    )
    findings = [finding for findings, _ in per_engine for finding in findings]
    versions = {version for _, version in per_engine if version is not None}
    if len(versions) > 1:
        findings.append(
            problem(
                "versions",
                f"engines run different versions of vLLM: {', '.join(sorted(versions))}",
                "install one version on all machines; KVCache is only understood by the same one",
            )
        )
    return findings


async def _check_engine(
    deployment: Deployment, instance: Instance, session: aiohttp.ClientSession
) -> tuple[list[Finding], str | None]:
    subject = f"engine {instance.name}"
    start = f"prfaas engine {deployment.path} {instance.name}"
    address = f"{instance.host}:{instance.http_port}"
    try:
        async with session.get(
            f"{instance.url}/health", timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
        ) as response:
            status = response.status
    except aiohttp.ClientConnectorError:
        return [problem(subject, f"nothing listens at {address}", f"start it on its machine: {start}")], None
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"{address} does not answer like an engine ({type(error).__name__})"
        return [problem(subject, text, f"see what uses the port and the engine's log, then: {start}")], None
    if status != 200:
        text = f"{address} answers /health with {status}"
        return [problem(subject, text, f"see its log, then start it again: {start}")], None
    version, findings = await _check_version(subject, instance, session)
    findings.append(await _check_served(deployment, instance, session))
    findings += await _check_kv_ports(deployment, instance)
    return findings, version


async def _check_version(
    subject: str, instance: Instance, session: aiohttp.ClientSession
) -> tuple[str | None, list[Finding]]:
    try:
        version = str((await get_json(session, f"{instance.url}/version", timeout_s=_TIMEOUT_S))["version"])
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        text = "is healthy but does not say which vLLM it is"
        return None, [
            problem(subject, text, f"see what runs at {instance.url}; it must be vLLM's OpenAI server")
        ]
    if numbers < OLDEST_VLLM:
        oldest = ".".join(str(number) for number in OLDEST_VLLM)
        return version, [problem(subject, f"runs vLLM {version}", f"install vLLM {oldest} or newer there")]
    return version, [ok(subject, f"is healthy, vLLM {version}")]


async def _check_served(
    deployment: Deployment, instance: Instance, session: aiohttp.ClientSession
) -> Finding:
    subject = f"engine {instance.name}"
    model = deployment.model
    again = f"start it again with this deployment file: prfaas engine {deployment.path} {instance.name}"
    try:
        lengths = await served_models(session, instance.url, timeout_s=_TIMEOUT_S)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return problem(subject, "does not list its models", again)
    if model.served_name not in lengths:
        return problem(subject, f"serves {', '.join(lengths)}, not {model.served_name}", again)
    length = lengths[model.served_name]
    if length != model.max_model_len:
        return problem(
            subject, f"takes {length} tokens, not {model.max_model_len} (model.max_model_len)", again
        )
    return ok(subject, f"serves {model.served_name} up to {length} tokens")


async def _check_kv_ports(deployment: Deployment, instance: Instance) -> list[Finding]:
    try:
        key = load_key(deployment.security.key_file)
    except KeyFileError:
        # Its own finding says so; without the key nothing can be asked here.
        return []
    return list(
        await asyncio.gather(
            *(_check_kv_port(deployment, instance, rank, key) for rank in range(instance.tensor_parallel))
        )
    )


async def _check_kv_port(deployment: Deployment, instance: Instance, rank: int, key: bytes) -> Finding:
    name = f"{instance.name}/{rank}"
    subject = f"KV port {name}"
    expected = _expected_connections(deployment, instance)
    observer = Observer("prfaas-doctor", key, instance.host, instance.kv_port + rank, name)
    try:
        async with asyncio.timeout(_KV_TIMEOUT_S + _SETTLE_S):
            connected = await _settled_connections(observer, sum(expected.values()))
    except (OSError, TimeoutError) as error:
        return problem(
            subject,
            str(error) or f"{instance.host}:{instance.kv_port + rank} does not answer",
            "open the port in firewalls, and see that both machines have the same key file and deployment file",
        )
    finally:
        await observer.close()
    if connected < sum(expected.values()):
        sources = ", ".join(expected)
        return problem(
            subject,
            f"has {connected} of {sum(expected.values())} connections from {sources}",
            f"see the logs of {sources}: not running, a closed port, or another model, vLLM or KV layout",
        )
    if not expected:
        return ok(subject, "is authenticated; nobody sends there")
    return ok(subject, f"is authenticated, {connected} connections from {', '.join(expected)}")


def _expected_connections(deployment: Deployment, instance: Instance) -> dict[str, int]:
    return {
        producer.name: peer.connections
        for producer in deployment.producers_for(instance)
        for peer in deployment.peers_of(producer)
        # On-demand connections come with the first transfer.
        if peer.instance.name == instance.name and not peer.on_demand
    }


async def _settled_connections(observer: Observer, expected: int) -> int:
    """Producers connect ahead of time, and again when a connection is lost: give them a moment."""
    deadline_s = asyncio.get_running_loop().time() + _SETTLE_S
    while True:
        connected = int((await observer.stats())["producer_connections"])
        if connected >= expected or asyncio.get_running_loop().time() > deadline_s:
            return connected
        await asyncio.sleep(0.5)
