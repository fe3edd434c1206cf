"""What `prfaas doctor` finds at the gateway, and whether a long prompt is really prefilled elsewhere."""

import json
import math
import random
from collections.abc import Sequence

import aiohttp

from prfaas.core.deployment import Deployment
from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.core.units import format_bytes
from prfaas.tools.doctor.files import Finding, ok, problem

_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=300.0)
_ANSWER_TOKENS = 2
# A probe is this much over the threshold, and so long where there is none.
# So much longer than the threshold no idle deployment prefills at home by policy tilted.
_CLEAR = 1.5
_OVER_TOKENS = 64
_LONG_TOKENS = 4096


async def check_gateway(deployment: Deployment, session: aiohttp.ClientSession) -> Finding:
    """The gateway is up and has an engine to decode with."""
    url = deployment.gateway.url
    try:
        async with session.get(f"{url}/health", timeout=_HEALTH_TIMEOUT) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return problem(
            "gateway",
            f"nothing answers at {url}",
            f"start it: prfaas serve {deployment.path} (or all of it: prfaas up {deployment.path})",
        )
    if status != 200:
        return problem("gateway", f"{url}/health says {status}: {text[:200]}", "mend the engines first")
    return ok("gateway", f"is healthy at {url}")


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
    try:
        async with session.post(url, json=body, timeout=_PROBE_TIMEOUT) as response:
            status, header, text = response.status, response.headers.get(ROUTE_HEADER), await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"a prompt of {length} tokens got no answer ({type(error).__name__})"
        return problem(subject, text, "see the logs of the gateway and the engines")
    if status != 200 or header is None:
        text = f"a prompt of {length} tokens got status {status}: {text[:200]}"
        return problem(subject, text, "see the logs of the gateway and the engines")
    try:
        route = RouteHeader.parse(header)
    except ValueError as error:
        return problem(
            subject, str(error), f"see what runs at {deployment.gateway.url}; it must be this prfaas"
        )
    return judge_route(deployment, length, threshold_tokens, route)


def judge_route(deployment: Deployment, length: int, threshold_tokens: float, route: RouteHeader) -> Finding:
    """Whether a probe of `length` tokens went where the policy sends it, with its KVCache moved."""
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
    """Above how many tokens every PD cluster offloads now, by the gateway's word; infinite if one never does."""
    try:
        async with session.get(f"{deployment.gateway.url}/prfaas/state", timeout=_HEALTH_TIMEOUT) as response:
            clusters = (await response.json())["clusters"] if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        clusters = {}
    told = [clusters[c.name].get("threshold_tokens") for c in deployment.pd_clusters if c.name in clusters]
    if not told:
        return deployment.routing.threshold_tokens or math.inf
    return max(math.inf if tokens is None else tokens for tokens in told)


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
        config = json.loads((deployment.model.path / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        # Embeddings are often padded beyond the last real token.
        return max(2, int(size) // 2)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 256
