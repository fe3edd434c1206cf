"""vLLM's own scheduler, and a load whose transfer broke: it asks again, and goes on from what has come."""

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.serving.engines.tiny.checkpoint import tiny_model
from prfaas.serving.engines.vllm.metadata import StepReports, TransferMetadata
from prfaas.serving.engines.vllm.template import import_model
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import (
    TICKET_PARAMETER,
    TRANSFER_ID_BYTES,
    Ticket,
    prompt_digest,
)

KEY = bytes.fromhex("ab" * 32)
BLOCK, CHUNK, TOKENS = 16, 512, 1000


class Steps:
    """vLLM's scheduler with our connector, of a model with full attention that answers with token 7."""

    def __init__(self, scheduler: Any, hasher: Any) -> None:
        self.scheduler = scheduler
        self.hasher = hasher
        self.computed: list[int] = []

    def add(self, tokens: list[int], sealed: str) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=2,
            ignore_eos=True,
            temperature=0.0,
            extra_args={"kv_transfer_params": {TICKET_PARAMETER: sealed}},
        )
        sampling.update_from_generation_config({}, 2)
        request = Request("r", tokens, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(
        self, ended: set[str] | None = None, *, failed: bool = False, usable_tokens: int = 0
    ) -> TransferMetadata:
        """One step, in which the loads of `ended` ended."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        assert isinstance(orders, TransferMetadata)
        names = list(output.num_scheduled_tokens)
        self.computed += output.num_scheduled_tokens.values()
        meta = (
            StepReports({}, dict.fromkeys(ended or (), ResumePoints(usable_tokens)))
            if usable_tokens
            else None
        )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[
                    [7] if not self.scheduler.requests[name].is_prefill_chunk else [] for name in names
                ],
                kv_connector_output=KVConnectorOutput(
                    finished_recving=ended,
                    failed_recving=(ended or set()) if failed else set(),
                    kv_connector_worker_meta=meta,
                ),
            ),
        )
        return orders


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    key = tmp_path / "key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    extra = {
        "name": "home",
        "kv_host": "127.0.0.1",
        "kv_port": 1,
        "key_file": str(key),
        "peers": {},
        "producers": [],
        "staging_bytes": 1 << 20,
    }
    model = tiny_model("qwen3", tmp_path)
    # Of a class that is not there vLLM would ask a process that imports all of it.
    import_model(model)
    vllm_config = EngineArgs(
        model=str(model),
        max_model_len=8192,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=4,
        block_size=BLOCK,
        enable_prefix_caching=True,
        enforce_eager=True,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PrfaasConnector",
            kv_connector_module_path="prfaas.serving.engines.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    ).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = 400
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=400, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["full"], full)]
    )
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    manager = StructuredOutputManager(vllm_config)
    scheduler = Scheduler(vllm_config, config, manager, block_size=BLOCK)
    connector: Any = scheduler.connector
    connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
    yield Steps(scheduler, get_request_block_hasher(BLOCK, hash_function))


@pytest.mark.parametrize("usable_tokens", [0, 256, 640, 992])
def test_the_rest_is_computed_and_nothing_twice(steps: Steps, usable_tokens: int) -> None:
    tokens = [(31 * index) % 30000 + 10 for index in range(TOKENS + 1)]
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=TOKENS,
        skip_tokens=0,
        prompt_digest=prompt_digest(tokens[:TOKENS]),
        expires_at_s=time.time() + 600,
    )
    request = steps.add(tokens, ticket.seal(KEY))
    (whole,) = steps.step().loads
    assert (whole.usable_tokens, steps.computed) == (0, [])
    steps.step({"r"}, failed=True, usable_tokens=usable_tokens)
    orders = steps.step()
    if usable_tokens:
        (part,) = orders.loads
        assert part.usable_tokens == usable_tokens
        assert [len(run.block_ids) for run in part.runs] == [usable_tokens // BLOCK]
        assert steps.computed == []
        steps.step({"r"})
    for _ in range(10):
        if request.is_finished():
            break
        steps.step()
    assert request.is_finished() and list(request.output_token_ids) == [7, 7]
    # The prompt's rest, and the first token of the answer.
    assert sum(steps.computed) == TOKENS + 1 - usable_tokens + 1
