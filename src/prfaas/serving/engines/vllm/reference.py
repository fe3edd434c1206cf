"""A logits processor that gives a plain engine the same split of the prompt as a disaggregated request has.

A disaggregated request computes `prompt[:-1]` on one engine and the last prompt token, alone, on another. In bf16 the
split shows in the last bits, so a fair comparison needs it too: the plain engine gets `prompt[:-1]` and is made to
"answer" with `prompt[-1]` first. Everything after that is the answer to the whole prompt.

Load it with `--logits-processors prfaas.serving.engines.vllm.reference:ForcedFirstTokens`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as RowLogitsProcessor

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

LOGITS_PROCESSOR = "prfaas.serving.engines.vllm.reference:ForcedFirstTokens"
FORCED_TOKENS_ARG = "forced_first_tokens"


class ForcedFirstTokens(AdapterLogitsProcessor, RowLogitsProcessor):
    """The first output tokens are those in `vllm_xargs["forced_first_tokens"]` (a list of ids), if it is given.

    It is a processor of both model runners, since vLLM chooses the runner: the one of engines without Triton asks it
    for each request (`new_req_logits_processor`), the one of GPUs for each row of a batch (`add_request`, `apply`).

    Logprobs stay the model's own: vLLM takes them from the logits before processors run (`logprobs_mode`
    raw_logprobs, its default, or raw_logits), also those of the forced tokens.
    """

    def __init__(self, vllm_config: "VllmConfig", *of_runner: Any) -> None:
        """`of_runner`: device and whether memory is pinned; of the runner of GPUs its requests' state instead."""
        self._forced: dict[int, Sequence[int]] = {}
        if len(of_runner) == 1:
            (self._requests,) = of_runner
        else:
            super().__init__(vllm_config, *of_runner)

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Raises ValueError (an HTTP 400) unless the argument is a list of whole numbers from 0 on."""
        _forced_tokens(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Greedy answers change, so vLLM must not skip this processor for them."""
        return False

    def new_req_logits_processor(
        self, params: "SamplingParams"
    ) -> "Callable[[list[int], torch.Tensor], torch.Tensor] | None":
        """The function that vLLM calls with a request's output ids so far and its logits (vocabulary,)."""
        forced = _forced_tokens(params.extra_args)
        if not forced:
            return None

        def force(output_ids: list[int], logits: "torch.Tensor") -> "torch.Tensor":
            position = len(output_ids)
            if position < len(forced):
                logits.fill_(float("-inf"))
                logits[forced[position]] = 0.0
            return logits

        return force

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """A request takes a slot; True: its logits are changed."""
        self._forced[req_idx] = _forced_tokens(sampling_params.extra_args)
        return bool(self._forced[req_idx])

    def apply(self, logits: "torch.Tensor", ctx: "LogitsContext | None" = None) -> "torch.Tensor":
        """Change logits (rows, vocabulary) in place. `ctx`: of the runner of GPUs, whose rows are slots' positions."""
        if ctx is None:
            changed: torch.Tensor = super().apply(logits)
            return changed
        if any(self._forced[slot] for slot in ctx.idx_mapping_np.tolist()):
            for row, slot, position in zip(
                logits, ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True
            ):
                forced = self._forced[slot]
                nth = position + 1 - int(self._requests.prompt_len.np[slot])
                # Before 0 are the ends of a prompt's chunks: what is sampled there is dropped.
                if 0 <= nth < len(forced):
                    row.fill_(float("-inf"))
                    row[forced[nth]] = 0.0
        return logits


def _forced_tokens(extra_args: dict[str, Any] | None) -> Sequence[int]:
    forced = (extra_args or {}).get(FORCED_TOKENS_ARG)
    if forced is None:
        return ()
    if not isinstance(forced, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in forced
    ):
        raise ValueError(f"vllm_xargs.{FORCED_TOKENS_ARG} must be a list of token ids, not {forced!r}")
    return tuple(forced)
