"""What tells two models apart that have the same configuration: their weights and their tokenizers.

KVCache of other weights looks like KVCache of these. So engines exchange it, and a pool keeps it, only where these
identities are equal. Reading a terabyte at every start would take too long: weights are sampled.

What is compared of each file of weights: its name, its size, its safetensors header (names, types, shapes and places
of the tensors) and two samples of every tensor, at places that follow from its name. Other formats: the name, the size
and samples at equal distances. Files of the tokenizer are compared whole.

What it can miss: a change of few values within a tensor, for example by hand or by a damaged disk. What training,
quantization or merging changes, it sees: that is nearly every value of a tensor. Needs neither torch nor vLLM.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_TOKENIZER = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.tiktoken",
)
_DIGEST_BYTES = 8
_SAMPLE_BYTES = 128
_SAMPLES_OF_A_TENSOR = 2
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
    def of(cls, model: str, tokenizer: str, revision: str | None = None) -> "ModelIdentity":
        """Read it off the files.

        Args:
            model: directory of the checkpoint. Any other name stands for itself, with its revision.
            tokenizer: directory of the tokenizer, likewise.
            revision: of a model that is not in a directory.

        Raises:
            OSError: a file can't be read.
        """
        return cls(
            _identity(Path(model), _WEIGHTS, _sampled, revision),
            _identity(Path(tokenizer), _TOKENIZER, _whole, revision),
        )


def _identity(
    directory: Path, patterns: Sequence[str], digest_of: Callable[[Path], bytes], revision: str | None
) -> str:
    identity = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if directory.is_dir():
        files = sorted({file for pattern in patterns for file in directory.glob(pattern) if file.is_file()})
        with ThreadPoolExecutor(_READERS) as readers:
            for file, digest in zip(files, readers.map(digest_of, files), strict=True):
                identity.update(file.name.encode() + b"\0" + digest)
    else:
        identity.update(f"{directory}\0{revision}".encode())
    return identity.hexdigest()


def _whole(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()


def _sampled(file: Path) -> bytes:
    digest = hashlib.blake2b()
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(size.to_bytes(8, "little"))
        header = _safetensors_header(descriptor, size) if file.suffix == ".safetensors" else None
        places = _tensor_samples(header) if header is not None else _even_samples(size)
        digest.update(header or b"")
        for start in places:
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
    finally:
        os.close(descriptor)
    return digest.digest()


def _safetensors_header(descriptor: int, size: int) -> bytes | None:
    """The JSON text at the file's beginning; None: the file is damaged, or of another format."""
    length = int.from_bytes(os.pread(descriptor, _HEADER_LENGTH_BYTES, 0), "little")
    if length > min(_MOST_HEADER_BYTES, size - _HEADER_LENGTH_BYTES):
        return None
    return os.pread(descriptor, length, _HEADER_LENGTH_BYTES)


def _tensor_samples(header: bytes) -> Iterator[int]:
    """Where samples begin: within each tensor, at places that its name and the file's header choose."""
    behind_header = _HEADER_LENGTH_BYTES + len(header)
    tensors = {
        name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"
    }
    for name, (start, end) in tensors.items():
        room = max(1, end - start - _SAMPLE_BYTES)
        chosen = hashlib.blake2b(name.encode(), digest_size=8 * _SAMPLES_OF_A_TENSOR).digest()
        for index in range(0, len(chosen), 8):
            yield behind_header + start + int.from_bytes(chosen[index : index + 8], "little") % room


def _even_samples(size: int) -> Iterator[int]:
    return iter(range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES_OF_A_FILE)))
