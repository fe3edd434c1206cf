"""What crosses between two sites is captured and searched: prompts, their token ids and salts are never in clear."""

import random
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from prfaas.serving.gateway.prompts.request import Tenants
from prfaas.serving.secret_files import load_key
from wan.laboratory import Laboratory, LineSettings
from wan.load import synthetic_model
from wan.stack import (
    FAR,
    GATEWAY_HOST,
    GATEWAY_PORT,
    HOME,
    SERVED_NAME,
    WanStack,
    engines_of,
    write_deployment,
)

pytestmark = [
    pytest.mark.wan,
    pytest.mark.extended("what is encrypted is in `make test` by the settings of each connection"),
    pytest.mark.timeout(300),
]

# Of Linux; Python's module lacks them.
ETH_P_ALL, SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE = 3, 263, 6, 33
TENANT_HEADER, TENANT = "x-tenant", "acme-4711"
PASSAGE = "the vault of Oslo opens with seven grey keys and nobody else may know of it"
IDS = random.Random(36).choices(range(1000, 50_000), k=1500)
RTT_S, RATE_BITS_PER_S = 0.002, 1e9


class Capture:
    """Every packet that enters or leaves a namespace, by TCP stream."""

    def __init__(self, laboratory: Laboratory, host: str) -> None:
        with laboratory.inside(host):
            self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        self._sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._sock.settimeout(0.2)
        self._pieces: dict[bytes, dict[int, bytes]] = defaultdict(dict)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="test-capture", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                packet, (device, *_) = self._sock.recvfrom(1 << 17)
            except TimeoutError:
                if self._over.is_set():
                    return
                continue
            # What an engine says to itself stays where it is.
            if device != "lo" and packet[0] >> 4 == 4 and packet[9] == socket.IPPROTO_TCP:
                header = 4 * (packet[0] & 15)
                tcp = packet[header : int.from_bytes(packet[2:4])]
                payload = tcp[4 * (tcp[12] >> 4) :]
                self._pieces[packet[12:20] + tcp[:4]][int.from_bytes(tcp[4:8])] = payload

    def streams(self) -> list[bytes]:
        """What was said in each direction of each connection; the capture ends."""
        self._over.set()
        self._thread.join()
        _, dropped = struct.unpack("II", self._sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self._sock.close()
        assert dropped == 0
        return [b"".join(said for _, said in sorted(pieces.items())) for pieces in self._pieces.values()]


@contextmanager
def serving(folder: Path, *, encrypted: bool) -> Iterator[tuple[WanStack, Capture]]:
    """Stand-ins at two sites, everything offloaded from one to the other, and what crosses from the beginning."""
    engines = engines_of(1, [("prefill",), ("decode",)])
    line = LineSettings.of_round_trip(RATE_BITS_PER_S, RTT_S)
    with Laboratory({FAR: 1, HOME: 2}, line) as laboratory:
        deployment = write_deployment(
            folder,
            laboratory,
            engines,
            model=synthetic_model(folder / "model"),
            max_model_len=8192,
            bandwidth_bits_per_s=line.goodput_bits_per_s,
            rtt_s=RTT_S,
            encryption=encrypted,
            clusters={
                FAR: {"hardware": "synthetic", "profile": "internal-1t-h200", "speedup": 4},
                HOME: {"hardware": "synthetic", "profile": "internal-1t-h20", "speedup": 4},
            },
            routing={"policy": "offload_all"},
            control={"allocation": False},
            engine={"kv_cache_gib": 1, "staging": "64 MiB", "transfer_block": "256 KiB"},
            security={
                "engine_tls": "elsewhere" if encrypted else "never",
                "tenant_header": TENANT_HEADER,
            },
        )
        capture = Capture(laboratory, f"{FAR}-0")
        with WanStack(laboratory, deployment, engines).started() as stack:
            yield stack, capture


def secrets_of(stack: WanStack) -> Mapping[str, list[bytes]]:
    """What must not be seen, in the forms in which it could be written."""
    salt = Tenants(load_key(stack.deployment.security.key_file), TENANT_HEADER).salt(Headers())
    tokenizer = Tokenizer.from_file(f"{stack.deployment.model.path}/tokenizer.json")
    return {
        # As far as the gateway can tokenize it, a text crosses as ids, whether encrypted or not.
        "text": [PASSAGE.encode(), *written(tokenizer.encode(PASSAGE, add_special_tokens=False).ids[8:16])],
        "token ids": written(IDS[700:704]),
        "salt": [salt.encode(), bytes.fromhex(salt)],
        "tenant": [TENANT.encode()],
    }


def written(ids: Sequence[int]) -> list[bytes]:
    """Some ids that follow each other, in JSON, as integers of 4 and 8 bytes, and in MessagePack."""
    return [
        ",".join(map(str, ids)).encode(),
        ", ".join(map(str, ids)).encode(),
        struct.pack(f"<{len(ids)}I", *ids),
        struct.pack(f"<{len(ids)}Q", *ids),
        msgspec.msgpack.encode(ids)[1:],
    ]


class Headers:
    """Those of a request of the tenant."""

    def getall(self, key: str, default: list[str]) -> list[str]:
        return [TENANT] if key == TENANT_HEADER else default


@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
def test_what_is_said_between_sites_is_in_clear_only_where_the_file_asks_for_it(
    tmp_path: Path, encrypted: bool
) -> None:
    with serving(tmp_path, encrypted=encrypted) as (stack, capture):
        text = " ".join([PASSAGE] * 60)
        asked: list[tuple[str, Any]] = [
            ("/v1/completions", {"prompt": IDS}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ]
        for path, body in asked:
            body |= {"model": SERVED_NAME, "max_tokens": 4}
            status, answer = stack.ask(
                GATEWAY_HOST, GATEWAY_PORT, path, body, headers={TENANT_HEADER: TENANT}
            )
            assert status == 200, answer
        known = secrets_of(stack)
    said = capture.streams()
    seen = {what for what, forms in known.items() if any(form in each for form in forms for each in said)}
    # The KVCache is in what was searched.
    assert sum(map(len, said)) > len(IDS) * 1024
    assert seen == (set() if encrypted else {"text", "token ids", "salt"})
