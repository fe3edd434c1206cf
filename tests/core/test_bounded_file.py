"""Files without end, too long or too deep: each reader refuses them in a sentence, with little memory and soon."""

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.bounded_file import MODEL_BYTES, WRITTEN_BYTES, file_bytes, file_json
from prfaas.core.deployment.load import load_deployment
from prfaas.core.deployment.speculation import speculation_of
from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.drafters import DrafterError
from prfaas.core.kv.hf_config import model_from_config, model_from_file
from prfaas.core.latency.files import ProfileError, load_profile
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import read_requests
from prfaas.core.yaml_source import FileError

ENDLESS = Path("/dev/zero")
DENSE = {"model_type": "qwen3", "num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2}


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1024)
    assert file_bytes(path, 1024) == b"x" * 1024
    for each, most in ((path, 1023), (ENDLESS, 1 << 20)):
        with pytest.raises(OSError, match="it has more than"):
            file_bytes(each, most)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "{", '"\udcff"'])
def test_json_of_any_kind_is_a_value_or_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError):
        file_json(path, WRITTEN_BYTES)


@pytest.mark.parametrize(
    ("read", "error", "most"),
    [
        (load_deployment, FileError, WRITTEN_BYTES),
        (load_profile, ProfileError, WRITTEN_BYTES),
        (model_from_file, ConfigError, MODEL_BYTES),
    ],
)
def test_files_without_end_are_refused(
    read: Callable[[Path], Any], error: type[Exception], most: int
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=f"it has more than {most >> 20} MiB"):
            read(ENDLESS)
        assert tracemalloc.get_traced_memory()[1] < 4 * most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["a: [" + "1," * 150_000 + "1]", "".join(f"k{n}: 1\n" for n in range(70_000))]
)
@pytest.mark.slow("megabytes of text")
def test_a_file_of_many_values_is_given_up_at_its_bound(tmp_path: Path, text: str) -> None:
    """Not when all of them have become objects, which took a minute and 1.5 GB for 10 MB."""
    path = tmp_path / "sites.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match="has more than 100000 values"):
        load_deployment(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 16384"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers must be at most 16384, not 1000000"),
        ({"num_attention_heads": 10**400}, "num_attention_heads must be at most"),
        ({"num_attention_heads": "8" * 10_000}, "num_attention_heads must be a whole number"),
        *(
            (
                {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": factor}},
                "factor must be",
            )
            for factor in (1e308, float("nan"), float("inf"), -1, 0, 10**400)
        ),
    ],
)
def test_absurd_numbers_of_a_model_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        model_from_config({**DENSE, **fields})
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.csv.gz"])
def test_a_line_without_end_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb") as packed:
        for _ in range(64):
            packed.write(b" " * (1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(WorkloadError, match=r":1: has more than 4194304 characters"):
            read_requests(path)
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow("megabytes of text")
def test_a_header_of_many_columns_takes_time_as_it_is_long(tmp_path: Path) -> None:
    """Each name was counted among all others: four hundred billion comparisons here."""
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{number}" for number in range(400_000)) + "\n")
    with pytest.raises(WorkloadError, match="no format that is known"):
        read_requests(path)


def test_vllm_args_that_nest_too_deeply_are_refused() -> None:
    with pytest.raises(DrafterError, match="must be a JSON object"):
        speculation_of(("--speculative-config", "[" * 100_000))
