"""Real vLLM engines that keep the same KV otherwise: in other blocks, among other numbers of ranks, in other dtypes."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import pytest
from tests.ports import neighbours

from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype
from prfaas.core.kv.hf_config import model_from_directory
from prfaas.serving.engines.command import CPU_RETENTION_TOKENS
from prfaas.serving.engines.preparation import _has_avx_512, ensure_model

from .known_pages import with_known_pages
from .stack import (
    LOGITS,
    MODEL,
    PATIENCE_S,
    DemoAnswer,
    Stack,
    prompt,
    wait_until,
    write_deployment,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own for each pair"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"


@dataclass(frozen=True)
class Side:
    """How an engine keeps its KV."""

    ranks: int
    block_tokens: int
    kv_cache_dtype: KvCacheDtype = "auto"
    stages: int = 1

    def __str__(self) -> str:
        stages = f"{self.stages}of" * (self.stages > 1)
        return f"{stages}{self.ranks}x{self.block_tokens}" + f"-{self.kv_cache_dtype}" * (
            self.kv_cache_dtype != "auto"
        )

    @property
    def divided(self) -> str:
        """As the support table has it."""
        return f"TP {self.ranks}" + f", PP {self.stages}" * (self.stages > 1)


@dataclass(frozen=True)
class Unlike:
    """The engine that prefills elsewhere, and the one that decodes."""

    model: str
    prefill: Side
    decode: Side
    is_of_gpus: bool = False
    """With the model runner that vLLM takes on GPUs."""

    def __str__(self) -> str:
        return f"{self.model}-{self.prefill}-to-{self.decode}" + "-runner-of-gpus" * self.is_of_gpus

    @property
    def shims(self) -> tuple[str, ...]:
        return (*["with_stages"] * (self.prefill.stages > 1), *["with_triton"] * self.is_of_gpus)

    @property
    def dtypes(self) -> str:
        """As the support table has it."""
        kept = [each.kv_cache_dtype.replace("auto", "16 bits") for each in (self.prefill, self.decode)]
        return " → ".join(dict.fromkeys(kept))

    @property
    def is_converted(self) -> bool:
        """Half the bytes travel, and tokens are not those of equal engines."""
        return self.prefill.kv_cache_dtype != self.decode.kv_cache_dtype


# Blocks become larger and smaller, ranks fewer and more. Attention alone, windows, windows of more heads, states.
CASES = (
    Unlike("mimo-v2-flash", Side(1, 32), Side(1, 128)),
    Unlike("gpt-oss", Side(1, 128), Side(2, 32)),
    # Two heads of KV: two ranks have a copy of each.
    Unlike("qwen3", Side(4, 128), Side(1, 32)),
    # Each stage sends the layers that it has.
    Unlike("qwen3-next", Side(1, 512, stages=2), Side(1, 512)),
    # Rounded by the engine that prefills, or kept so from the start.
    Unlike("qwen3", Side(2, 32, "fp8_e4m3"), Side(1, 128)),
    Unlike("qwen3-next", Side(1, 512), Side(1, 384, "fp8_e4m3")),
)
MORE_CASES = (
    Unlike("qwen3", Side(1, 32), Side(1, 128)),
    Unlike("qwen3", Side(2, 128), Side(2, 32)),
    Unlike("qwen3", Side(1, 128), Side(2, 128)),
    # Two ranks read what one of them is sent.
    Unlike("qwen3", Side(1, 128), Side(4, 128)),
    Unlike("gpt-oss", Side(1, 32), Side(1, 128)),
    Unlike("qwen3", Side(1, 128, stages=2), Side(1, 128)),
    Unlike("qwen3", Side(1, 128, stages=2), Side(2, 32)),
    Unlike("qwen3-next", Side(1, 512, stages=2), Side(2, 256)),
    Unlike("mimo-v2-flash", Side(2, 32), Side(1, 128)),
    # States set the least size of a block. Those of two ranks are in `make test` where one of them dies.
    Unlike("qwen3-next", Side(2, 256), Side(1, 512)),
    Unlike("qwen3-next", Side(1, 512), Side(2, 256)),
    Unlike("qwen3", Side(2, 128), Side(1, 32), is_of_gpus=True),
    Unlike("qwen3-next", Side(1, 512), Side(2, 256), is_of_gpus=True),
)
EXTENDED = pytest.mark.extended(
    "each model, number of ranks, dtype and direction is in `make test`: these put them together otherwise"
)
PARAMS = [*CASES, *(pytest.param(case, marks=EXTENDED) for case in MORE_CASES)]


@pytest.fixture(scope="module", params=PARAMS, ids=str)
def unlike(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Unlike, Stack]]:
    """One engine that prefills elsewhere and one that decodes, with other blocks and ranks."""
    case: Unlike = request.param
    if case.is_converted and not _has_avx_512():
        pytest.skip("vLLM has fp8 caches on CPUs with AVX-512 alone")
    path = write_deployment(tmp_path_factory.mktemp(f"prfaas-{case}"), bandwidth="1 Gbit/s")
    document: dict[str, Any] = json.loads(path.read_text())
    document["model"]["tiny"] = case.model
    document["clusters"][1]["instances"].pop(0)
    # A multiple of both sides' blocks.
    retained_tokens = lcm(CPU_RETENTION_TOKENS, case.prefill.block_tokens, case.decode.block_tokens)
    document["engine"]["prefix_cache_retention_tokens"] = retained_tokens
    for cluster in document["clusters"]:
        side = case.prefill if cluster["kind"] == "prfaas" else case.decode
        cluster["extra_args"] = ["--block-size", str(side.block_tokens)]
        if side.kv_cache_dtype != "auto":
            cluster["kv_cache_dtype"] = side.kv_cache_dtype
        for instance in cluster["instances"]:
            if side.ranks > 1:
                instance |= {"tensor_parallel": side.ranks, "kv_port": neighbours(side.ranks)}
            if side.stages > 1:
                ports = neighbours(side.ranks * side.stages)
                instance |= {"pipeline_parallel": side.stages, "kv_port": ports}
    path.write_text(json.dumps(document))
    stack = Stack(path, with_known_pages(*case.shims))
    ensure_model(stack.deployment)
    with stack:
        # A first transfer waits two seconds for engines to meet. On a machine that starves they need longer, and the
        # prompt is prefilled where it is decoded.
        seeds = itertools.count(9000)
        wait_until(lambda: crossed(stack.complete(prompt(next(seeds), 2100), 1)), PATIENCE_S, "they have met")
        stack.wait_clean()
        yield case, stack


def crossed(answer: DemoAnswer) -> bool:
    return answer.route["prefill"] == PREFILL and "fallback" not in answer.route


@pytest.mark.shows(
    model="{unlike.model}",
    prefill="{unlike.prefill.divided}",
    decode="{unlike.decode.divided}",
    dtype="{unlike.dtypes}",
    interpreted="{unlike.is_of_gpus}",
    what="blocks of {unlike.prefill.block_tokens} and {unlike.decode.block_tokens} tokens",
)
def test_answers_and_bytes_are_those_of_equal_engines(unlike: tuple[Unlike, Stack]) -> None:
    case, stack = unlike
    narrower = (
        case.decode.kv_cache_dtype if case.prefill.kv_cache_dtype == "auto" else case.prefill.kv_cache_dtype
    )
    kv_model = model_from_directory(
        stack.deployment.model.path, name=MODEL, dtypes=CacheDtypes(narrower, "auto")
    )
    wire_tokens = gcd(case.prefill.block_tokens, case.decode.block_tokens)
    loads, failures = (f"vllm:prfaas_loads_{end}_total" for end in ("completed", "failed"))
    before, failed = (stack.metric(DECODE, name) for name in (loads, failures))
    answered = []
    # Ends inside blocks of both, of one, and of none.
    for seed, tokens in enumerate((2600, 3075, 4097)):
        ids = prompt(900 + seed, tokens)
        answer = stack.complete(ids, **LOGITS)
        assert crossed(answer), stack.explain(answer)
        # Every byte once. Where windows have more heads, vLLM makes other layers' blocks so much longer.
        most_tokens = 2 * wire_tokens if case.model == "mimo-v2-flash" else wire_tokens
        least, most = (
            kv_model.bytes_to_move(tokens - 1, 0, block_tokens=each) for each in (wire_tokens, most_tokens)
        )
        assert least <= int(answer.route["bytes"]) <= most
        answered.append((ids, answer))
        stack.wait_clean()
    is_exact = case.model != "qwen3-next" and not case.is_converted
    if is_exact and case.prefill.ranks == case.decode.ranks == 1 and case.prefill.stages == 1:
        for ids, answer in answered:
            stack.check_answer(answer, stack.reference(ids, engine=DECODE))
    else:
        # Ranks add their sums up in another order, and with states chunks end where blocks do.
        stack.check_likely(*((ids, answer.token_ids) for ids, answer in answered), engine=DECODE)
    assert stack.metric(DECODE, loads) - before == 3 * case.decode.ranks
    # But for those before they had met.
    assert stack.metric(DECODE, failures) == failed
    assert stack.metric(DECODE, "vllm:prfaas_digest_mismatches_total") == 0
    assert stack.state()["incompatible"] == []
