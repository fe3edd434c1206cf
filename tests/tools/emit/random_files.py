"""Random deployment files that every kind of `prfaas emit` takes."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from prfaas.tools.emit.blueprint import Blueprint, read_blueprint

TOKEN_FILE = "admin-token"


@st.composite
def deployment_fields(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a file: one or two sites that prefill, one or two that decode, hosts by address or by name."""
    decoding = draw(st.integers(1, 2))
    names = ["East", "north_1"][: draw(st.integers(1, 2))] + ["home", "west.b"][:decoding]
    tensor_parallel = draw(st.sampled_from([1, 2, 4]))
    clusters = [
        _cluster(draw, number, name, "pd" if name in ("home", "west.b") else "prfaas", tensor_parallel)
        for number, name in enumerate(names)
    ]
    pairs = [
        (source, target)
        for source in names
        for target in names
        if source != target and (target == "home" or draw(st.booleans()))
    ]
    admin: dict[str, Any] = {"port": 8001}
    if draw(st.booleans()):
        admin |= {"host": "0.0.0.0", "token_file": TOKEN_FILE}
    return {
        "name": "Random.one",
        "model": {"path": "/models/some", "served_name": "some", "max_model_len": 4096},
        "clusters": clusters,
        "links": [
            {
                "source": source,
                "target": target,
                "bandwidth": "1 Gbit/s",
                "encryption": draw(st.booleans()),
            }
            for source, target in pairs
        ],
        "routing": {"threshold_tokens": 1000},
        "gateway": {
            "host": draw(st.sampled_from(["0.0.0.0", "::", "10.9.0.1"])),
            "port": 8000,
            "admin": admin,
            **({"cluster": "home"} if decoding > 1 else {}),
        },
        "security": {"engine_tls": draw(st.sampled_from(["elsewhere", "always", "never"]))},
        "containers": {
            "networks": {name: [f"10.{100 + number}.0.0/16"] for number, name in enumerate(names)},
            "pod_monitor": draw(st.booleans()),
            **({"models_claim": "models"} if draw(st.booleans()) else {}),
        },
    }


def _cluster(draw: st.DrawFn, number: int, name: str, kind: str, tensor_parallel: int) -> dict[str, Any]:
    by_name = draw(st.booleans())
    count = draw(st.integers(1, 3))
    together = not by_name and draw(st.booleans())
    instances = []
    for index in range(count):
        own = f"{name}-{index}"
        label = own.lower().replace("_", "-").replace(".", "-")
        host = f"{label}.site{number}.example" if by_name else f"10.{number}.0.{1 if together else 1 + index}"
        roles = ["prefill"] if kind == "prfaas" else ["decode"] if index == 0 else ["prefill", "decode"]
        instance: dict[str, Any] = {
            "name": own,
            "roles": roles,
            "host": host,
            "http_port": 9000 + index,
            "kv_port": 9100 + 10 * index,
            "tensor_parallel": tensor_parallel,
        }
        instances.append(instance)
    pool: dict[str, Any] = {"memory": "64 MiB", "kv_port": 9300}
    if draw(st.booleans()):
        pool |= {"ssd": "1 GiB", "path": "/mnt/nvme"}
    return {
        "name": name,
        "kind": kind,
        "hardware": draw(st.sampled_from(["h200", "mi300"])),
        "instances": instances,
        **({"pool": pool} if draw(st.booleans()) else {}),
    }


def blueprint_of(folder: Path, fields: dict[str, Any]) -> Blueprint:
    """What is emitted from, read from a file."""
    path = folder / "random.yaml"
    path.write_text(yaml.safe_dump(fields))
    return read_blueprint(path)
