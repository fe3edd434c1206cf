"""`--logits-processors scripted:Scripted`: a tiny model says what the prompt has between `BEGIN` and `END`.

It goes on from wherever the answer stands, be its beginning the engine's own or a part of the prompt.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from prfaas.serving.engines.tiny.configs import END_ID

# The ids of tiny models are bytes.
BEGIN, END = 2, 3


class Scripted(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, _params: Any) -> Callable[[list[int], list[int], Any], Any] | None:
        def force(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
            if BEGIN in prompt_ids and END in prompt_ids:
                script = [*prompt_ids[prompt_ids.index(BEGIN) + 1 : prompt_ids.index(END)], END_ID]
                ids = [*prompt_ids, *output_ids]
                said = next(n for n in range(len(script) - 1, -1, -1) if ids[len(ids) - n :] == script[:n])
                logits.fill_(float("-inf"))
                logits[script[said]] = 0.0
            return logits

        return force
