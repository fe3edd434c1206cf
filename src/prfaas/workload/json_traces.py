"""Traces with one JSON object per line: Mooncake's, and our own."""

from pathlib import Path

from prfaas.workload.json_lines import block_ids_of, objects_of, seconds_of, tokens_of
from prfaas.workload.lines import bad_line
from prfaas.workload.trace import Trace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
MS_PER_S = 1000.0


def read_mooncake(path: Path) -> Trace:
    """Mooncake's format (FAST'25 release): timestamp in ms, input_length, output_length and hash_ids, one per
    block of 512 tokens, each standing for its block and all before it.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    seen: set[int] = set()
    requests = []
    for where, row in objects_of(path):
        prompt = tokens_of(where, row, "input_length")
        blocks = block_ids_of(where, row, "hash_ids")
        known = 0
        while known < len(blocks) and blocks[known] in seen:
            known += 1
        seen.update(blocks)
        requests.append(
            TraceRequest(
                arrival_s=seconds_of(where, row, "timestamp") / MS_PER_S,
                input_tokens=prompt,
                output_tokens=tokens_of(where, row, "output_length"),
                cached_tokens=min(known * MOONCAKE_BLOCK_TOKENS, prompt),
            )
        )
    return Trace.of(str(path), tuple(requests))


def read_jsonl(path: Path) -> Trace:
    """Our own format: arrival_s, input_tokens, output_tokens, and cached_tokens if it is known.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    requests = []
    for where, row in objects_of(path):
        prompt = tokens_of(where, row, "input_tokens")
        cached = tokens_of(where, row, "cached_tokens") if "cached_tokens" in row else None
        if cached is not None and cached > prompt:
            raise bad_line(*where, f"cached_tokens ({cached}) can't be more than input_tokens ({prompt})")
        requests.append(
            TraceRequest(
                seconds_of(where, row, "arrival_s"), prompt, tokens_of(where, row, "output_tokens"), cached
            )
        )
    return Trace.of(str(path), tuple(requests))
