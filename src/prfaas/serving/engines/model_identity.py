"""Identity of a model beyond its configuration: its weights and its tokenizer.

KVCache of other weights looks like KVCache of these. So engines exchange it, and a pool keeps it, only where these
identities are equal. Reading a terabyte at every start would take too long: weights are sampled.

What is compared of each file of weights: its name, its size, its safetensors header (names, types, shapes and places
of the tensors) and two samples of every tensor, at places that follow from its name. Other formats: the name, the size
and samples at equal distances. Of an index, the file that it names for each tensor. Files of the tokenizer are compared
whole, above 64 MiB by samples at equal distances.

What is read is bounded: of a file of weights its header (100 MB at most, by the format) and 16,384 samples of
128 bytes at most (2 MiB). Above 8,192 tensors in one file some tensors have one sample, above 16,384 some have none.

What it can miss: a change of few values within a tensor, for example by hand or by a damaged disk. What training,
quantization or merging changes, it sees: that is nearly every value of a tensor. Needs neither torch nor vLLM.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from prfaas.core.bounded_file import MODEL_BYTES, file_bytes

_INDEX_SUFFIX = ".index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", f"*{_INDEX_SUFFIX}")
_TOKENIZER = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.tiktoken",
)
_DIGEST_BYTES = 8
# Tokenizers have some megabytes; a single file that holds weights too may be named as one.
_MOST_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 128
_SAMPLES_OF_A_TENSOR = 2
# Of a file with very many tensors.
_MOST_SAMPLES_OF_A_FILE = 16_384
# Of a file that isn't cut into tensors.
_SAMPLES_OF_A_FILE = 1024
_HEADER_LENGTH_BYTES = 8
# The format allows no longer header.
_MOST_HEADER_BYTES = 100_000_000
# Cold reads wait for the disk, not for a processor.
_READERS = 16


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Equal for equal models, wherever their files lie."""

    weights: str
    tokenizer: str

    @classmethod
    def of(
        cls,
        model: str,
        tokenizer: str,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
    ) -> "ModelIdentity":
        """Read it off the files.

        A name of the Hugging Face hub stands for the files of it in this machine's cache. A name without such files
        (of an object store, of a directory without weights) stands for itself, with its revision.

        Args:
            model: directory or single file of the checkpoint, or its name.
            tokenizer: directory or single file of the tokenizer, or its name.
            revision: of the model, where it is a name.
            tokenizer_revision: of the tokenizer, likewise.

        Raises:
            OSError: a file can't be read.
        """
        return cls(
            _identity(model, _WEIGHTS, _sampled, revision),
            _identity(tokenizer, _TOKENIZER, _whole, tokenizer_revision),
        )


def _identity(
    name: str, patterns: Sequence[str], digest_of: Callable[[Path], bytes], revision: str | None
) -> str:
    identity = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    path = Path(name)
    if path.is_file():
        # Its name may be part of the path to it.
        identity.update(digest_of(path))
        return identity.hexdigest()
    directory = path if path.is_dir() else _downloaded(name, revision)
    found = (
        {file for pattern in patterns for file in directory.glob(pattern)} if directory is not None else set()
    )
    files = sorted(file for file in found if file.is_file())
    with ThreadPoolExecutor(_READERS) as readers:
        for file, digest in zip(files, readers.map(digest_of, files), strict=True):
            identity.update(file.name.encode() + b"\0" + digest)
    if not files:
        # vLLM's revision may be text that remembers the commit it was resolved to.
        identity.update(f"{path}\0{getattr(revision, 'resolved', revision)}".encode())
    return identity.hexdigest()


def _downloaded(name: str, revision: str | None) -> Path | None:
    """Where this machine has the files of a name of the hub; None: it has none. Asks nobody over the network."""
    try:
        # No file is asked for: an engine downloads only those that it needs.
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[]))
    except (OSError, ValueError):
        return None


def _whole(file: Path) -> bytes:
    if file.stat().st_size > _MOST_WHOLE_BYTES:
        return _sampled(file)
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()


def _sampled(file: Path) -> bytes:
    if file.name.endswith(_INDEX_SUFFIX):
        return _index_digest(file)
    digest = hashlib.blake2b()
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(size.to_bytes(8, "little"))
        header = _safetensors_header(descriptor, size) if file.suffix == ".safetensors" else None
        places = _places(header, size)
        digest.update(header or b"")
        for start in places:
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
    finally:
        os.close(descriptor)
    return digest.digest()


def _index_digest(file: Path) -> bytes:
    """Of the file that the index names for each tensor, or of all its bytes where it names none."""
    content = file_bytes(file, MODEL_BYTES)
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        content = json.dumps(json.loads(content)["weight_map"], sort_keys=True).encode()
    return hashlib.blake2b(content).digest()


def _few(places: Sequence[int]) -> Sequence[int]:
    """So many of them, evenly, as are read of one file."""
    most = _MOST_SAMPLES_OF_A_FILE
    return places if len(places) <= most else [places[index * len(places) // most] for index in range(most)]


def _safetensors_header(descriptor: int, size: int) -> bytes | None:
    """The JSON text at the file's beginning; None: the file is damaged, or of another format."""
    length = int.from_bytes(os.pread(descriptor, _HEADER_LENGTH_BYTES, 0), "little")
    if length > min(_MOST_HEADER_BYTES, size - _HEADER_LENGTH_BYTES):
        return None
    return os.pread(descriptor, length, _HEADER_LENGTH_BYTES)


def _places(header: bytes | None, size: int) -> Sequence[int]:
    """Where samples of a file begin; evenly where its header says nothing that can be."""
    if header is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _few(list(_tensor_samples(header, size)))
    return _even_samples(size)


def _tensor_samples(header: bytes, size: int) -> Iterator[int]:
    """Where samples begin: within each tensor, at places that its name and the file's header choose."""
    behind_header = _HEADER_LENGTH_BYTES + len(header)
    tensors = {
        name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"
    }
    for name, (start, end) in tensors.items():
        if not 0 <= start <= end <= size:
            raise ValueError(f"{name} is not within the file")
        room = max(1, end - start - _SAMPLE_BYTES)
        chosen = hashlib.blake2b(name.encode(), digest_size=8 * _SAMPLES_OF_A_TENSOR).digest()
        for index in range(0, len(chosen), 8):
            yield behind_header + start + int.from_bytes(chosen[index : index + 8], "little") % room


def _even_samples(size: int) -> Sequence[int]:
    return range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES_OF_A_FILE))
