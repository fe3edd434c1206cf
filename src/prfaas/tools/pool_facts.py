"""The pools of a deployment, as `prfaas doctor` judges them: room on this machine, answers, and who uses them."""

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.core.units import format_bytes
from prfaas.serving.engines.preparation import port_problem
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.pool.daemon import arena_path
from prfaas.tools.finding import Finding, ok, problem
from prfaas.tools.security_facts import reported, tools_ports

_TIMEOUT_S = 6.0


async def check_pools(deployment: Deployment) -> list[Finding]:
    """All checks of all pools, in the order of the file."""
    ports = tools_ports(deployment)
    answers = await asyncio.gather(*(_figures(node, ports) for node in deployment.pools))
    findings = []
    for node, figures in zip(deployment.pools, answers, strict=True):
        if isinstance(figures, str):
            findings.append(_silent(deployment, node, figures))
        else:
            findings += _judged(deployment, node, figures)
        if _is_here(node):
            findings += check_room(deployment, node, is_running=not isinstance(figures, str))
    return findings + _compared(dict(zip((node.name for node in deployment.pools), answers, strict=True)))


async def _figures(node: PoolNode, ports: KvPorts | None) -> Mapping[str, Any] | str:
    """The figures that a pool reports at its KV port, or why it does not."""
    if ports is None:
        return "can't be asked without the key"
    try:
        stats = await reported(ports.of_pool(node), _TIMEOUT_S)
        return dict(stats.get("pool", {}).get("store", {}))
    except (OSError, TimeoutError) as error:
        return str(error) or f"{node.host}:{node.kv_port} does not answer"


def _silent(deployment: Deployment, node: PoolNode, why: str) -> Finding:
    return problem(
        f"pool {node.name}",
        f"{why}; its engines compute every prefix that they have forgotten",
        f"start it on its machine: prfaas pool {deployment.path} {node.name}",
    )


def _judged(deployment: Deployment, node: PoolNode, figures: Mapping[str, Any]) -> list[Finding]:
    subject = f"pool {node.name}"
    # One of the scheduler, one of each rank.
    wanted = sum(1 + deployment.instance(name).tensor_parallel for name in node.instances)
    sessions = int(figures.get("engine_sessions", 0))
    if sessions < wanted:
        text = f"has {sessions} of {wanted} sessions of {', '.join(node.instances)}"
        mend = (
            "see these engines' logs for lines about the pool: not running, another state directory, "
            "other weights or another layout than the engine that came first"
        )
        return [problem(subject, text, mend)]
    held = format_bytes(int(figures.get("used_bytes", 0)))
    of = format_bytes(int(figures.get("memory_bytes", node.memory_bytes)))
    text = f"answers, used by {', '.join(node.instances)}; {held} of {of} memory in use"
    findings = [ok(subject, text)]
    disk = figures.get("ssd_state")
    if disk is not None and disk != "writable":
        mend = f"mend the disk under {node.path}; until then what is evicted from memory is lost"
        findings.append(problem(subject, f"its disk can't be used: {disk}", mend))
    return findings


def _compared(answers: Mapping[str, Mapping[str, Any] | str]) -> list[Finding]:
    """Pools exchange pages only where they hold the same model."""
    fingerprints = {
        name: str(figures["fingerprint"])
        for name, figures in answers.items()
        if not isinstance(figures, str) and "fingerprint" in figures
    }
    if len(set(fingerprints.values())) < 2:
        return []
    text = "pages are of different models: " + ", ".join(
        f"{name} {each[:12]}" for name, each in fingerprints.items()
    )
    return [problem("pools", text, "give all engines the same checkpoint, vLLM and tensor_parallel")]


def check_room(deployment: Deployment, node: PoolNode, *, is_running: bool) -> list[Finding]:
    """Shared memory and disk of this machine. A pool that runs has its memory already."""
    subject, findings = f"pool {node.name}", []
    arena = arena_path(deployment.pool_socket(node))
    if not is_running and not arena.exists():
        free_bytes = shutil.disk_usage(arena.parent).free
        if free_bytes < node.memory_bytes:
            text = f"needs {format_bytes(node.memory_bytes)} in {arena.parent}, which has {format_bytes(free_bytes)}"
            mend = (
                f"mount -o remount,size=… {arena.parent}, docker run --shm-size=…, or a smaller pool.memory"
            )
            findings.append(problem(subject, text, mend))
    if node.ssd_bytes:
        findings += _check_disk(subject, node)
    return findings


def _check_disk(subject: str, node: PoolNode) -> list[Finding]:
    there = _nearest(node.path)
    if not os.access(there, os.W_OK | os.X_OK):
        mend = f"chown or chmod {there} for the user that runs the pool, or name another pool.path"
        return [problem(subject, f"{there} can't be written to", mend)]
    taken_bytes = sum(each.stat().st_blocks * 512 for each in node.path.rglob("*") if each.is_file())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes + taken_bytes < node.ssd_bytes:
        text = (
            f"may take {format_bytes(node.ssd_bytes)} at {node.path}, "
            f"where {format_bytes(free_bytes + taken_bytes)} are free"
        )
        return [problem(subject, text, "make room there, or give a smaller pool.ssd")]
    return []


def _nearest(path: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    return next(each for each in (path, *path.parents) if each.exists())


def _is_here(node: PoolNode) -> bool:
    """Whether the pool's host is an address of this machine."""
    return port_problem(node.host, 0) is None
