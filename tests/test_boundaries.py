"""Where bytes from outside become values: all that reads without a bound of its own, or decodes, is listed with why.

A new place is looked at: what is read there has a bound, or comes from where nobody else can write. Boundaries with
their bounds and tests: docs/reference/invariants.md.
"""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/prfaas"

# Each of one reason: files, and what they call.
SHIPPED = {
    "cli/init.py": "read_bytes read_text",
    "cli/init_draft.py": "read_text",
    "cli/monitoring.py": "read_text",
    "core/kv/config_fields.py": "read_text yaml.load",
    "core/kv/published.py": "read_text yaml.load",
    "core/latency/files.py": "read_text",
    "core/latency/roofline.py": "msgspec.json.decode read_bytes",
    "core/workload/trace_columns.py": "json.loads read_bytes",
    "serving/console/pages.py": "read_bytes",
    "serving/engines/tiny/checkpoint.py": "read_bytes",
    "tools/emit/monitoring.py": "read_text",
    "tools/emit/template.py": "yaml.load_all yaml.safe_load",
    "tools/monitoring/alerts.py": "read_text yaml.safe_load",
}
# The kernel, this process itself, its own children and what they wrote; nobody else gets there.
OWN = {
    "serving/engines/preparation.py": "read_text",
    "serving/engines/trained/wheels.py": "read_text zipfile.ZipFile",
    "serving/engines/vllm/sibling_ranks.py": "frombuffer recv unpack",
    "serving/engines/vllm/template.py": "exec json.loads readline recv_fds",
    "serving/pool/arena.py": "mmap.mmap read_text unpack_from",
    "serving/pool/journal.py": "msgspec.msgpack.Decoder read_bytes unpack_from",
    "serving/pool/page_table.py": "unpack_from",
    "serving/pool/processes.py": "read_text unpack",
    "core/prefix/hashing.py": "frombuffer iter_unpack unpack_from",
}
# Views of memory that this process, or its machine's engines and pool, hold already: no byte is read by them.
VIEWS = {
    "core/scheduling/length_window.py": "frombuffer",
    "core/workload/requests.py": "frombuffer",
    "serving/engines/page_digests.py": "frombuffer",
    "serving/engines/synthetic/content.py": "frombuffer",
    "serving/engines/vllm/cut_pages.py": "frombuffer",
    "serving/engines/vllm/dense_sums.py": "frombuffer",
    "serving/engines/vllm/device_pages.py": "frombuffer",
    "serving/engines/vllm/pages.py": "frombuffer",
    "serving/pool/copies.py": "frombuffer",
    "serving/pool/ssd_file.py": "frombuffer mmap.mmap",
    "serving/pool/ssd_tier.py": "frombuffer",
    "serving/pool/store.py": "frombuffer",
    "serving/transport/io/staging_memory.py": "mmap.mmap",
}
# Files that somebody put there: bounded, see the table. What else is decoded has come through one of these.
FILES = {
    "core/bounded_file.py": "json.loads",
    "core/deployment/speculation.py": "json.loads",
    "core/workload/servegen.py": "msgspec.json.decode read tarfile.open",
    "core/workload/trace.py": "csv.reader gzip.open json.loads",
    "serving/engines/model_identity.py": "json.loads",
    "serving/gateway/ways/first_token.py": "orjson.loads",
    "tools/emit/blueprint.py": "yaml.compose",
    "tools/rollout.py": "msgspec.json.decode",
}
# KV ports, staging shared by ranks, events and pools: frames that say their length, and no more than their kind may.
FRAMES = {
    "core/pool/geometry.py": "msgspec.msgpack.decode",
    "core/prefix/digests.py": "msgspec.msgpack.Decoder",
    "core/prefix/events.py": "msgspec.msgpack.Decoder",
    "serving/pool/client.py": "frombuffer msgspec.msgpack.Decoder recv_fds recv_into",
    "serving/pool/daemon.py": "msgspec.msgpack.Decoder recv",
    "serving/transport/protocol/compression.py": "decompress frombuffer unpack_from",
    "serving/transport/protocol/handover.py": "msgspec.msgpack.decode",
    "serving/transport/io/greeting.py": "read readexactly recv",
    "serving/transport/io/observer.py": "readexactly",
    "serving/transport/io/sibling_staging.py": "msgspec.msgpack.Decoder recv_fds unpack",
    "serving/transport/io/sockets.py": "recv_into unpack_from",
    "serving/transport/protocol/ticket.py": "msgspec.msgpack.decode",
    "serving/transport/protocol/wire.py": "msgspec.json.Decoder unpack_from",
}
# Over HTTP: bodies are bounded by `BodyReader` and aiohttp's `client_max_size`, answers by `HttpPool` and
# `read_bounded`, lines of etcd's watch by aiohttp's buffer, streams by their parsers: `EventStream`, `SseParser`.
HTTP = {
    "cli/common.py": "json.loads",
    "serving/bounded_answer.py": "iter_chunked",
    "serving/engines/synthetic/api_bodies.py": "orjson.loads",
    "serving/engines/synthetic/server.py": "json read",
    "serving/fleet/control.py": "msgspec.json.decode",
    "serving/fleet/etcd.py": "msgspec.json.Decoder readuntil",
    "serving/gateway/answers/answer_bytes.py": "orjson.loads",
    "serving/gateway/answers/calls.py": "msgspec.json.decode",
    "serving/gateway/answers/shadow.py": "orjson.loads",
    "serving/gateway/answers/transcript.py": "orjson.loads",
    "serving/gateway/bodies.py": "frombuffer fromstring msgspec.json.Decoder orjson.loads",
    "serving/gateway/console.py": "msgspec.json.decode read",
    "serving/gateway/dialects.py": "orjson.loads",
    "serving/gateway/intake.py": "readany",
    "serving/gateway/prompts/tokenization.py": "msgspec.json.decode",
    "serving/gateway/ways/hops.py": "orjson.loads",
    "tools/http_client.py": "iter_any orjson.loads",
    "tools/replay/client.py": "iter_any",
}
# Methods of our own with such a name, which have bounds.
OWN_METHODS = {
    "cli/bandwidth.py": "read",
    "cli/plan.py": "read",
    "cli/replay.py": "read",
    "cli/simulate.py": "read",
    "serving/gateway/answers/answering.py": "read",
    "serving/gateway/answers/streams.py": "orjson.loads read readany",
    "serving/gateway/clients.py": "read",
    "serving/gateway/engine_client.py": "read",
    "serving/gateway/http_pool.py": "readany",
}
LISTED = (SHIPPED, OWN, VIEWS, FILES, FRAMES, HTTP, OWN_METHODS)

_DECODERS = re.compile(
    r"(json|orjson|pickle|marshal|tomllib)\.loads?|pickle\.Unpickler|yaml\.\w*(load|load_all|compose|compose_all)"
    r"|csv\.(reader|DictReader)|(gzip|bz2|lzma)\.(open|decompress)|zlib\.decompress(obj)?|tarfile\.open|zipfile\.ZipFile"
    r"|mmap\.mmap|(np|numpy|torch)\.load|ast\.literal_eval|eval|exec|msgspec\.\w+\.(decode|Decoder)"
)
_ALWAYS = {"readexactly", "readuntil", "recv", "recv_into", "recvfrom", "recvmsg", "recv_fds"}
_ALWAYS |= {"unpack", "unpack_from", "iter_unpack", "frombuffer", "fromfile", "fromstring"}
_ALWAYS |= {"memmap", "decompress"}
_ALWAYS |= {"readany", "iter_any", "iter_chunked", "iter_chunks"}
# With a length they are bounded. `json` and `text` are aiohttp's: awaited, of all that comes.
_WHOLE = {"read", "readline", "readlines", "read_text", "read_bytes"}


def boundary_calls(source: str) -> Iterator[str]:
    """What a file calls that decodes, or reads all that there is."""
    tree = ast.parse(source)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            named = (f"{node.module}.{each.name}" for each in node.names)
            yield from (f"from {node.module}" for name in named if _DECODERS.fullmatch(name))
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if _DECODERS.fullmatch(called):
            yield called
        elif "." in called and (
            name in _ALWAYS
            or (name in _WHOLE and not node.args)
            or (name in ("json", "text") and not node.args and id(node) in awaited)
        ):
            yield name


def test_what_decodes_or_reads_without_a_bound_is_listed() -> None:
    found = {
        str(path.relative_to(SOURCE)): " ".join(sorted({*boundary_calls(path.read_text(encoding="utf-8"))}))
        for path in SOURCE.rglob("*.py")
    }
    listed = dict(chain.from_iterable(each.items() for each in LISTED))
    assert {file: calls for file, calls in found.items() if calls} == listed
    assert len(listed) == sum(map(len, LISTED))


def test_a_new_reader_is_found() -> None:
    new = """
import json, orjson, msgspec, struct, pickle
async def f(response, sock, path):
    orjson.loads(await response.read()), await response.json(), response.json(), response.read(100)
    msgspec.msgpack.Decoder(int), struct.unpack("q", sock.recv(8)), pickle.load(path.open()), path.read_text()
    eval("1"), path.eval("1"), json.dumps(1)
    async for piece in response.content.iter_any():
        np.frombuffer(piece, np.uint8), np.load(path), self.load(path)
    while piece := await response.content.readany():
        zstandard.ZstdDecompressor().decompress(piece)
"""
    assert sorted(boundary_calls(new)) == [
        *("decompress", "eval", "frombuffer", "iter_any", "json", "msgspec.msgpack.Decoder", "np.load"),
        *("orjson.loads", "pickle.load", "read", "read_text", "readany", "recv", "unpack"),
    ]
    assert [*boundary_calls("from json import dumps, loads")] == ["from json"]


def test_no_answer_sends_a_question_elsewhere() -> None:
    """A server that redirects would have tools and gateways ask whom it likes."""
    asked = 0
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "session." in text else ():
            if isinstance(node, ast.Call) and re.fullmatch(
                r"(self\.)?_?session\.(get|post|put|delete|request)", ast.unparse(node.func)
            ):
                asked += 1
                assert "allow_redirects=False" in map(ast.unparse, node.keywords), f"{path}:{node.lineno}"
    assert asked >= 8


def test_each_boundary_of_the_page_has_a_reader_and_a_test() -> None:
    page = (ROOT / "docs/reference/invariants.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| what | reader | most | shown by |\n")
    rows = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()[1:]]
    assert len(rows) >= 16
    for what, readers, most, tests in rows:
        files = re.findall(r"`([\w/]+\.py)`", readers)
        folders = (SOURCE, SOURCE / "serving")
        assert files or "`answers/`" in readers or "struct" in readers, what
        assert all(any((folder / file).exists() for folder in folders) for file in files), readers
        shown = re.findall(r"`([\w/]+\.py)`", tests)
        assert shown and all((ROOT / "tests" / file).exists() for file in shown), tests
        assert re.search(r"\d|as the frame|what the model", most), most
