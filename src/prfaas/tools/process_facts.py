"""Facts of engines' and gateways' processes (clock, file descriptors, version), and the problems there."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from prfaas import __version__
from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.bounded_answer import read_bounded
from prfaas.serving.certificates import https_options
from prfaas.serving.gateway import GatewayOptions
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.secret_files import AdminTokenError, TlsFileError, load_token
from prfaas.tools.finding import Finding, ok, problem
from prfaas.tools.http_client import get_json
from prfaas.tools.security_facts import reported, tools_identity, tools_ports

_TIMEOUT_S = 6.0
_TIMEOUT = aiohttp.ClientTimeout(total=_TIMEOUT_S)
_MOST_BYTES = 8 << 20
_OPEN = re.compile(rb"^process_open_fds(?:\{[^\n]*\})? (\S+)", re.MULTILINE)
_MOST = re.compile(rb"^process_max_fds(?:\{[^\n]*\})? (\S+)", re.MULTILINE)
# Every stream, transfer and idle client has one; below this, usual load ends in refusals.
_LEAST_DESCRIPTORS = 4096
_FULL = 0.8
# The Date header has whole seconds.
_DATE_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts of one process, as far as it reports them."""

    name: str
    """For messages: "the gateway", "engine NAME"."""
    ahead_s: float | None = None
    """Its clock less this machine's; None: not reported."""
    open_descriptors: int | None = None
    max_descriptors: int | None = None
    prfaas_version: str | None = None
    """Of its plugin, or of the gateway."""


async def check_processes(deployment: Deployment, session: aiohttp.ClientSession) -> list[Finding]:
    """Clocks, file descriptors and versions of prfaas, of all that answer."""

    tls, ports = tools_identity(deployment), tools_ports(deployment)

    async def engine_facts(instance: Instance) -> ProcessFacts:
        version = await _plugin_version(ports, instance)
        name = f"engine {instance.name}"
        try:
            https = https_options(instance, tls)
        except TlsFileError:
            return ProcessFacts(name, prfaas_version=version)
        return await process_facts(session, name, instance.url, version=version, https=https)

    gateway, *engines = await asyncio.gather(
        _gateway_facts(deployment, session), *map(engine_facts, deployment.instances)
    )
    return [
        *check_clocks(engines, gateway, time.time()),
        *check_descriptors([gateway, *engines]),
        *check_versions([gateway, *engines]),
    ]


async def _gateway_facts(deployment: Deployment, session: aiohttp.ClientSession) -> ProcessFacts:
    name, admin, version, headers = "the gateway", deployment.gateway.admin, None, {}
    with suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        document = await get_json(session, f"{deployment.gateway.url}/version", timeout_s=_TIMEOUT_S)
        version = str(document["version"])
    with suppress(AdminTokenError):
        if admin.token_file is not None:
            headers = {"Authorization": f"Bearer {load_token(admin.token_file)}"}
    facts = await process_facts(session, name, admin.url, version=version, headers=headers)
    if facts.ahead_s is None:
        # The operators' port may be out of reach from here; the clients' port has no metrics, but a date.
        facts = await process_facts(session, name, deployment.gateway.url, version=version)
    return facts


async def _plugin_version(ports: KvPorts | None, instance: Instance) -> str | None:
    """The prfaas that an engine runs, by its KV port; None where that does not report it."""
    if ports is None:
        return None
    with suppress(OSError, TimeoutError):
        version = (await reported(ports.of_rank(instance, 0), _TIMEOUT_S)).get("version")
        return None if version is None else str(version)
    return None


async def process_facts(
    session: aiohttp.ClientSession,
    name: str,
    url: str,
    *,
    version: str | None = None,
    headers: Mapping[str, str] | None = None,
    https: Mapping[str, Any] | None = None,
    now_s: Callable[[], float] = time.time,
) -> ProcessFacts:
    """Ask `url`/metrics. What can't be read is None: whether the process answers at all is another check.

    Args:
        session: how to ask.
        name: for messages.
        url: base of the server's pages.
        version: the prfaas that runs there, if that is known.
        headers: of the request.
        https: as `https_options` makes it; None: over HTTP.
        now_s: Unix time.
    """
    begun_s = now_s()
    try:
        asked = session.get(
            f"{url}/metrics", timeout=_TIMEOUT, headers=headers, allow_redirects=False, **(https or {})
        )
        async with asked as response:
            between_s = (begun_s + now_s()) / 2
            date = response.headers.get("Date")
            text = await read_bounded(response, _MOST_BYTES) if response.status == 200 else b""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ProcessFacts(name, prfaas_version=version)
    return ProcessFacts(name, _ahead_s(date, between_s), _count(_OPEN, text), _count(_MOST, text), version)


def _ahead_s(date: str | None, now_s: float) -> float | None:
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp() + _DATE_S / 2 - now_s
    except (ValueError, OverflowError):
        return None


def _count(series: re.Pattern[bytes], text: bytes) -> int | None:
    found = series.search(text)
    try:
        return int(float(found.group(1))) if found is not None else None
    except (ValueError, OverflowError):
        return None


def check_clocks(engines: Sequence[ProcessFacts], gateway: ProcessFacts, now_s: float) -> list[Finding]:
    """Findings on clocks: tickets, which the gateway dates, must be good at the engines for their whole lifetime.

    Args:
        engines: all that report their clock.
        gateway: compared with; this machine's clock stands in for one that does not report.
        now_s: Unix time here.
    """
    options = GatewayOptions()
    lifetime_s = options.ticket_lifetime_s
    # A ticket must outlive the longest prefill; one of a clock that is behind would live for as much longer.
    most_s = lifetime_s - options.prefill_timeout_s
    base_s = gateway.ahead_s or 0.0
    base = gateway.name if gateway.ahead_s is not None else "this machine"
    found = []
    offsets = [(each, each.ahead_s - base_s) for each in engines if each.ahead_s is not None]
    for each, skew_s in offsets:
        if abs(skew_s) > most_s:
            found.append(
                problem(
                    "clocks",
                    f"{each.name} says {_clock(now_s + base_s + skew_s)}, {base} says {_clock(now_s + base_s)}: "
                    f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}, and tickets are good for "
                    f"{lifetime_s:.0f} s by the clock of the gateway",
                    "set the clocks of both machines, for example with chrony or systemd-timesyncd",
                )
            )
    if offsets and not found:
        furthest = max(abs(skew_s) for _, skew_s in offsets)
        found.append(ok("clocks", f"engines are within {max(furthest, _DATE_S):.0f} s of {base}"))
    return found


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(sep=" ", timespec="seconds")


def check_descriptors(processes: Sequence[ProcessFacts]) -> list[Finding]:
    """Findings on file descriptors: processes may open enough, and have enough left."""
    found, shares = [], []
    for each in processes:
        if each.open_descriptors is None or not each.max_descriptors:
            continue
        shares.append(each.open_descriptors / each.max_descriptors)
        text = f"{each.name} has {each.open_descriptors:,} of {each.max_descriptors:,} open"
        if shares[-1] > _FULL:
            mend = "raise the limit where it is started (ulimit -n, LimitNOFILE), or spread the load"
        elif each.max_descriptors < _LEAST_DESCRIPTORS:
            text = f"{each.name} may have only {each.max_descriptors:,}; every stream and transfer takes one"
            mend = f"allow {_LEAST_DESCRIPTORS:,} or more where it is started (ulimit -Hn, LimitNOFILE)"
        else:
            continue
        found.append(problem("file descriptors", text, mend))
    if shares and not found:
        found.append(ok("file descriptors", f"at most {max(shares):.0%} of any process's limit are open"))
    return found


def check_versions(processes: Sequence[ProcessFacts]) -> list[Finding]:
    """Findings on versions: all run the prfaas that is installed here."""
    reporting = [each for each in processes if each.prfaas_version is not None]
    found = [
        problem(
            "versions",
            f"{each.name} runs prfaas {each.prfaas_version}, here it is {__version__}",
            "install one version on all machines, then start it again",
        )
        for each in reporting
        if each.prfaas_version != __version__
    ]
    return found or ([ok("versions", f"all that tell run prfaas {__version__}")] if reporting else [])
