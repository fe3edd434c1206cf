"""Checks a deployment: its files, its engines and its gateway, and that a long prompt is really prefilled elsewhere."""

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.core.deployment import Deployment, DeploymentError, Instance, load_deployment
from prfaas.core.deployment.addresses import is_loopback
from prfaas.core.deployment.peers import peers_of, sources_of
from prfaas.core.deployment.speculation import kept_model
from prfaas.core.kv.config_fields import CacheDtypeError, ConfigError, UnknownModelError
from prfaas.core.kv.drafters import DrafterError
from prfaas.core.kv.hf_config import read_config
from prfaas.core.route_header import REQUEST_ID_HEADER, ROUTE_HEADER, RouteHeader
from prfaas.core.shipped import page
from prfaas.core.units import format_bytes
from prfaas.serving.bounded_answer import read_bounded
from prfaas.serving.certificates import https_options
from prfaas.serving.engines.synthetic import VERSION as SYNTHETIC_VERSION
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.secret_files import AdminTokenError, TlsFileError, load_token
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.tools.finding import Finding, any_problem, ok, problem
from prfaas.tools.http_client import AnswerError, get_json, served_models
from prfaas.tools.pool_facts import check_pools
from prfaas.tools.process_facts import check_processes
from prfaas.tools.security_facts import (
    check_certificates,
    check_encryption,
    check_key,
    tools_identity,
    tools_ports,
)

SUPPORTED_VLLM = ("0.32", "0.33")
"""Their sources have everything that the connector uses (`tests/serving/engines/vllm/test_contract.py`)."""

_TIMEOUT_S = 10.0
_KV_TIMEOUT_S = 6.0
_SETTLE_S = 3.0
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=_TIMEOUT_S)
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=300.0)
_ANSWER_TOKENS = 2
# By policy tilted, no idle deployment prefills a prompt at home that is so many times as long as the threshold.
_CLEAR = 1.5
# A probe is so much longer than the threshold, and so long where there is none.
_OVER_TOKENS = 64
_LONG_TOKENS = 4096
_KEY_VARIABLE = "PRFAAS_API_KEY"
_SAME_CERTIFICATES = (
    "see `prfaas certs FILE --show` on both machines: they need certificates of one CA that are good today"
)


async def diagnose(path: Path, *, probe: bool) -> list[Finding]:
    """All checks of the deployment in a file; `probe`: also of a prompt that is sent through it."""
    try:
        deployment = load_deployment(path)
    except DeploymentError as error:
        mend = f"correct the file; every field is in {page('reference/deployment-file')}"
        return [problem("file", str(error), mend)]
    findings = [ok("file", f"{path} is valid"), check_model(deployment), check_key(deployment)]
    findings += [*check_ranks(deployment), *check_certificates(deployment), *check_encryption(deployment)]
    async with aiohttp.ClientSession() as session:
        findings += await check_engines(deployment, session)
        findings += await check_pools(deployment)
        gateway = await check_gateway(deployment, session)
        findings += [gateway, *await check_processes(deployment, session)]
        if probe and not any_problem([gateway]):
            findings.append(await check_disaggregation(deployment, session))
    return findings


def check_model(deployment: Deployment) -> Finding:
    """The checkpoint is there (or will be made) and its KVCache is understood."""
    model, source = deployment.model, deployment.model.source
    later = "" if source is None or model.path.exists() else f"{source} comes when the first engine starts"
    if later and source is not None and source.kind != "trained":
        return ok("model", later)
    section, described = "model", dict[str, None]()
    try:
        for cluster in deployment.clusters:
            section = "model" if cluster.kv_cache_dtype is None else f"clusters[{cluster.name}]"
            described[kept_model(deployment, cluster).describe()] = None
    except CacheDtypeError as error:
        return problem("model", str(error), f"name another {section}.kv_cache_dtype in {deployment.path}")
    except DrafterError as error:
        mend = f"see --speculative-config in extra_args of {deployment.path}"
        return problem("model", f"engines of {cluster.name} and {error}", mend)
    except UnknownModelError as error:
        return ok("model", f"its engines tell what it keeps: {error}")
    except ConfigError as error:
        mend = f"prfaas model fetch {deployment.path}"
        if source is None:
            mend = f"set model.path in {deployment.path} to a checkpoint directory of a supported model"
        return problem("model", str(error), mend)
    return ok("model", "; ".join(filter(None, (*described, later))))


def check_ranks(deployment: Deployment) -> list[Finding]:
    """Engines that can't send each other anything, by the file alone; nothing where one size divides the other."""
    unlike = list(
        dict.fromkeys(
            tuple(sorted((instance, peer.member), key=lambda each: each.name))
            for instance in deployment.instances
            for peer in peers_of(deployment, instance)
            if not instance.rank_grid.paired(0, peer.member.rank_grid)
        )
    )
    if not unlike:
        return []
    one, other = unlike[0]
    more = f" (and {len(unlike) - 1} more pairs)" if len(unlike) > 1 else ""
    return [
        problem(
            "ranks",
            f"{one.name} has tensor_parallel {one.tensor_parallel} and {other.name} {other.tensor_parallel}: neither "
            f"divides the other, so no rank can map the other's KVCache{more}",
            f"give them sizes in {deployment.path} of which one divides the other; until then prompts are prefilled "
            "where they are decoded",
        )
    ]


async def check_engines(deployment: Deployment, session: aiohttp.ClientSession) -> list[Finding]:
    """All checks of all engines, in the order of the file."""
    tls, ports = tools_identity(deployment), tools_ports(deployment)
    asked = [_Engine(deployment, instance, session, tls, ports) for instance in deployment.instances]
    per_engine = await asyncio.gather(*(engine.checked() for engine in asked))
    findings = [finding for findings, _ in per_engine for finding in findings]
    versions = {
        version
        for instance, (_, version) in zip(deployment.instances, per_engine, strict=True)
        if version is not None and not instance.is_stand_in
    }
    key_file = deployment.security.key_file
    if any(version is not None for _, version in per_engine) and not key_file.exists():
        findings.append(
            problem(
                "key",
                f"engines run, but {key_file} is gone: what is started now has another key than they",
                "put the file back, or end the engines and the gateway and start all of them again",
            )
        )
    if len(versions) > 1:
        findings.append(
            problem(
                "versions",
                f"engines run different versions of vLLM: {', '.join(sorted(versions))}",
                "install one version on all machines; KVCache is only understood by the same one",
            )
        )
    return findings


@dataclass(frozen=True, slots=True)
class _Engine:
    """One engine that is asked: what each check is about, and how it would be started."""

    deployment: Deployment
    instance: Instance
    session: aiohttp.ClientSession
    tls: TlsIdentity | None
    ports: KvPorts | None

    @property
    def subject(self) -> str:
        return f"engine {self.instance.name}"

    @property
    def start(self) -> str:
        return f"prfaas engine {self.deployment.path} {self.instance.name}"

    async def checked(self) -> tuple[list[Finding], str | None]:
        """All findings, and the version of vLLM."""
        address = f"{self.instance.host}:{self.instance.http_port}"
        try:
            https = https_options(self.instance, self.tls)
            url = f"{self.instance.url}/health"
            asked = self.session.get(url, timeout=_HEALTH_TIMEOUT, allow_redirects=False, **https)
            async with asked as response:
                status = response.status
        except TlsFileError as error:
            return self._unusable(str(error), "mend the certificates first")
        except aiohttp.ClientSSLError as error:
            return self._unusable(
                f"{address} and this machine don't agree on TLS ({error})", _SAME_CERTIFICATES
            )
        except aiohttp.ClientConnectorError:
            return self._unusable(f"nothing listens at {address}", f"start it on its machine: {self.start}")
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"{address} does not answer like an engine ({type(error).__name__})"
            return self._unusable(text, f"see what uses the port and the engine's log, then: {self.start}")
        if status != 200:
            text = f"{address} answers /health with {status}"
            return self._unusable(text, f"see its log, then start it again: {self.start}")
        version, finding = await self._version(https)
        findings = [finding, await self._served(https), *await self._kv_ports()]
        if self.instance.nixl_port is not None:
            findings.append(await self._nixl(self.instance.nixl_port))
        return findings, version

    def _unusable(self, text: str, mend: str) -> tuple[list[Finding], None]:
        return [problem(self.subject, text, mend)], None

    async def _version(self, https: Mapping[str, Any]) -> tuple[str | None, Finding]:
        subject, url = self.subject, self.instance.url
        try:
            told = await get_json(self.session, f"{url}/version", timeout_s=_TIMEOUT_S, https=https)
            version = str(told["version"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            text = "is healthy but does not say which vLLM it is"
            return None, problem(subject, text, f"see what runs at {url}; it must be vLLM's OpenAI server")
        is_stand_in = version.startswith(SYNTHETIC_VERSION)
        if is_stand_in != self.instance.is_stand_in:
            wanted = "a synthetic engine" if self.instance.is_stand_in else "vLLM"
            text = f"is {version}, and the file wants {wanted}"
            return version, problem(subject, text, f"start it again: {self.start}")
        if is_stand_in:
            return version, ok(subject, f"is healthy, {version}: no model runs there")
        if _release_of(version) not in SUPPORTED_VLLM:
            text = f"runs vLLM {version}; the connector is checked against {' and '.join(SUPPORTED_VLLM)}"
            return version, problem(subject, text, "install one of these there, or a newer prfaas")
        return version, ok(subject, f"is healthy, vLLM {version}")

    async def _served(self, https: Mapping[str, Any]) -> Finding:
        model = self.deployment.model
        again = f"start it again with this deployment file: {self.start}"
        try:
            lengths = await served_models(self.session, self.instance.url, timeout_s=_TIMEOUT_S, https=https)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return problem(self.subject, "does not list its models", again)
        if model.served_name not in lengths:
            return problem(self.subject, f"serves {', '.join(lengths)}, not {model.served_name}", again)
        length = lengths[model.served_name]
        if length != model.max_model_len:
            text = f"takes {length} tokens, not {model.max_model_len} (model.max_model_len)"
            return problem(self.subject, text, again)
        return ok(self.subject, f"serves {model.served_name} up to {length} tokens")

    async def _nixl(self, port: int) -> Finding:
        subject, address = f"NIXL port {self.instance.name}", f"{self.instance.host}:{port}"
        try:
            async with asyncio.timeout(_KV_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self.instance.host, port)
        except (OSError, TimeoutError):
            mend = f"open the port in firewalls, and start the engine with this deployment file: {self.start}"
            return problem(subject, f"nothing answers at {address}", mend)
        writer.close()
        return ok(subject, f"listens at {address}")

    async def _kv_ports(self) -> list[Finding]:
        if self.ports is None:
            return []
        observers = self.ports.of_ranks(self.instance)
        per_rank = await asyncio.gather(*(self._kv_port(rank, each) for rank, each in enumerate(observers)))
        return [finding for findings in per_rank for finding in findings]

    async def _kv_port(self, rank: int, observer: Observer) -> list[Finding]:
        name = f"{self.instance.name}/{rank}"
        # On-demand connections come with the first transfer.
        sources = [each for each in sources_of(self.deployment, self.instance) if not each.path.on_demand]
        expected = {source.member.name: source.path.connections for source in sources}
        try:
            async with asyncio.timeout(_KV_TIMEOUT_S + _SETTLE_S):
                stats = await _settled_stats(observer, sum(expected.values()))
        except (OSError, TimeoutError) as error:
            text = str(error) or f"{self.instance.host}:{self.instance.kv_port + rank} does not answer"
            mend = "open the port in firewalls, and see that both machines have the same key file and deployment file"
            return [problem(f"KV port {name}", text, mend)]
        finally:
            await observer.close()
        return [judge_connections(f"KV port {name}", expected, stats), *judge_rejections(name, stats)]


def judge_connections(subject: str, expected: Mapping[str, int], stats: Mapping[str, Any]) -> Finding:
    """The finding on connections of the producers in `expected` (name → connections) to a KV port, from its `stats`."""
    connected, wanted, sources = stats["producer_connections"], sum(expected.values()), ", ".join(expected)
    if connected < wanted:
        return problem(
            subject,
            f"has {connected} of {wanted} connections from {sources}",
            f"see the logs of {sources}: not running, a closed port, or another model, vLLM or KV layout",
        )
    if not expected:
        return ok(subject, "is authenticated; nobody sends there")
    return ok(subject, f"is authenticated, {connected} connections from {sources}")


def judge_rejections(name: str, stats: Mapping[str, Any]) -> list[Finding]:
    """Findings on consumers that refuse KV from the rank `name`, in the words of the rejection."""
    return [
        problem(
            f"KV of {name} for {peer}",
            str(sentence),
            "start both with the same model, engine settings, vLLM, key and deployment file; within 30 s they connect",
        )
        for peer, sentence in stats["sender"].get("rejected", {}).items()
    ]


async def _settled_stats(observer: Observer, expected: int) -> dict[str, Any]:
    """Producers connect ahead of time, and again when a connection is lost: give them a moment."""
    deadline_s = asyncio.get_running_loop().time() + _SETTLE_S
    while True:
        stats = await observer.stats()
        if stats["producer_connections"] >= expected or asyncio.get_running_loop().time() > deadline_s:
            return stats
        await asyncio.sleep(0.5)


async def check_gateway(deployment: Deployment, session: aiohttp.ClientSession) -> Finding:
    """The gateway is up and has an engine to decode with."""
    url = deployment.gateway.url
    try:
        asked = session.get(f"{url}/health", timeout=_HEALTH_TIMEOUT, allow_redirects=False)
        async with asked as response:
            status, text = response.status, (await read_bounded(response)).decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError):
        return problem(
            "gateway",
            f"nothing answers at {url}",
            f"start it: prfaas serve {deployment.path} (or all of it: prfaas up {deployment.path})",
        )
    if status != 200:
        return problem("gateway", f"{url}/health says {status}: {text[:200]}", "mend the engines first")
    is_open = deployment.gateway.clients is None and not is_loopback(deployment.gateway.host)
    more = "; gateway.clients is left out, so whoever reaches it may send prompts" if is_open else ""
    return ok("gateway", f"is healthy at {url}{more}")


async def check_disaggregation(deployment: Deployment, session: aiohttp.ClientSession) -> Finding:
    """Send a prompt that nobody has cached and that is over the threshold; see which way it went and what moved."""
    subject = "disaggregation"
    threshold_tokens = await _threshold_tokens(deployment, session)
    room = deployment.model.max_model_len - _ANSWER_TOKENS
    over_tokens = _OVER_TOKENS
    if deployment.routing.policy == "tilted" and threshold_tokens < math.inf:
        # Just above its threshold the transfer's time decides.
        over_tokens = max(math.ceil(threshold_tokens * (_CLEAR - 1)), _OVER_TOKENS)
    length = min(int(threshold_tokens) + over_tokens if threshold_tokens < room else _LONG_TOKENS, room)
    body = {
        "model": deployment.model.served_name,
        "prompt": _unseen_prompt(deployment, length),
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
    }
    url = f"{deployment.gateway.url}/v1/completions"
    headers = {"Authorization": f"Bearer {os.environ[_KEY_VARIABLE]}"} if _KEY_VARIABLE in os.environ else {}
    try:
        asked = session.post(url, json=body, timeout=_PROBE_TIMEOUT, headers=headers, allow_redirects=False)
        async with asked as response:
            status, header = response.status, response.headers.get(ROUTE_HEADER)
            text = (await read_bounded(response)).decode("utf-8", "replace")
            request_id = response.headers.get(REQUEST_ID_HEADER, "")
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"a prompt of {length} tokens got no answer ({type(error).__name__})"
        return problem(subject, text, "see the logs of the gateway and the engines")
    if status != 200:
        text = f"a prompt of {length} tokens got status {status}: {text[:200]}"
        mend = (
            f"give the key of a client as {_KEY_VARIABLE}"
            if status == 401
            else "see the logs of the gateway and the engines"
        )
        return problem(subject, text, mend)
    try:
        route = None if header is None else RouteHeader.parse(header)
        if route is None or not route.prefill:
            # Clients are told no more than the route, and unnamed ones beside tenants not even that.
            told = await _operators_page(deployment, session, f"/prfaas/requests/{request_id}")
            route = RouteHeader.parse(str(told["route"]))
    except (aiohttp.ClientError, TimeoutError, KeyError, AnswerError, AdminTokenError) as error:
        admin = deployment.gateway.admin.url
        return problem(
            subject,
            f"a prompt of {length} tokens was answered, but {admin} does not say how ({error})",
            "run doctor on the gateway's machine, or see gateway.admin in the deployment file",
        )
    except ValueError as error:
        return problem(
            subject, str(error), f"see what runs at {deployment.gateway.url}; it must be this prfaas"
        )
    return judge_route(deployment, length, threshold_tokens, route)


def judge_route(deployment: Deployment, length: int, threshold_tokens: float, route: RouteHeader) -> Finding:
    """The finding on a probe of `length` tokens: its route by the policy, and its KVCache moved."""
    subject = "disaggregation"
    went = f"a prompt of {length} tokens was prefilled by {route.prefill}, decoded by {route.decode}"
    expected = expected_route(deployment, length, threshold_tokens) or route.route
    why = route.fallback or route.reason or "unknown"
    if route.route != expected:
        return problem(
            subject,
            f"{went}: route {route.route} and not {expected}, because: {why}",
            "mend the engines and KV ports that are reported above, and see the log of the prefill engine",
        )
    if route.kv_bytes == 0 and _must_move(deployment, expected):
        return problem(
            subject,
            f"{went}, but no KVCache moved ({why}): the decode engine computed everything again",
            "mend the KV ports that are reported above, and see the log of the decode engine",
        )
    return ok(subject, f"{went} ({route.route}), {format_bytes(route.kv_bytes)} of KVCache moved")


def expected_route(deployment: Deployment, length: int, threshold_tokens: float) -> str | None:
    """Where a prompt of `length` uncached tokens should be prefilled; None where the policy may do either."""
    remote = any(deployment.prefill_clusters_to(cluster.name) for cluster in deployment.pd_clusters)
    policy = deployment.routing.policy
    if not remote or policy == "local_only":
        return "local"
    if policy == "offload_all":
        return "offload"
    if policy in ("paper", "static_threshold"):
        return "offload" if length > threshold_tokens else "local"
    return "offload" if policy == "tilted" and length >= _CLEAR * threshold_tokens else None


async def _threshold_tokens(deployment: Deployment, session: aiohttp.ClientSession) -> float:
    """The threshold above which every PD cluster offloads now, as the gateway reports; infinite if one never does."""
    try:
        clusters = (await _operators_page(deployment, session, "/prfaas/state"))["clusters"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        clusters = {}
    told = [clusters[c.name].get("threshold_tokens") for c in deployment.pd_clusters if c.name in clusters]
    if not told:
        return deployment.routing.threshold_tokens or math.inf
    return max(math.inf if tokens is None else tokens for tokens in told)


async def _operators_page(
    deployment: Deployment, session: aiohttp.ClientSession, path: str
) -> dict[str, Any]:
    """A JSON page of the gateway's operators. Raises what `get_json` raises, and AdminTokenError."""
    admin = deployment.gateway.admin
    headers = {} if admin.token_file is None else {"Authorization": f"Bearer {load_token(admin.token_file)}"}
    return await get_json(session, f"{admin.url}{path}", timeout_s=_TIMEOUT_S, headers=headers)


def _must_move(deployment: Deployment, expected: str) -> bool:
    if expected == "offload":
        return True
    return all(
        any(not instance.has_role("decode") for instance in cluster.with_role("prefill"))
        for cluster in deployment.pd_clusters
    )


def _unseen_prompt(deployment: Deployment, length: int) -> Sequence[int]:
    """Random token ids, so that no cache can know the prompt. The first ids are often special, so they are left out."""
    source = random.SystemRandom()
    size = _vocabulary_size(deployment)
    return [source.randrange(min(32, size // 2), size) for _ in range(length)]


def _vocabulary_size(deployment: Deployment) -> int:
    try:
        config = read_config(deployment.model.path / "config.json")
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        # Embeddings are often padded beyond the last real token.
        return max(2, int(size) // 2)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 256


def _release_of(version: str) -> str:
    """`0.32.0+cpu` → `0.32`; what is no version as it came."""
    return ".".join(version.partition("+")[0].split(".")[:2])
