"""What a gateway's ledger keeps of each request: what was predicted, what the other way would have cost, what came.

No prompt, no answer, no secret. Money is in the currency of the deployment file's prices, 0 where it has none.
"""

from msgspec import Struct
from msgspec.structs import fields

VERSION = 2
"""Of the columns."""


class LedgerEntry(Struct, frozen=True, kw_only=True):
    """One request to generate, as a row.

    `None`: not known. "Other" is the way that was not taken: of an offloaded request the prefill in its PD cluster, of
    one that was held out the prefill elsewhere. Its numbers were predicted with the queues of the same moment. Requests
    for which nothing else was considered have none.
    """

    at_s: float
    """Unix time of the arrival."""
    request_id: str
    slice: int | None
    """Of an experiment (`core/experiment.py`), by its number; None: there was none."""
    arm: str
    """How requests of that slice were routed: `as-is`, or what was other; empty: there was no experiment."""
    washout: bool
    """It came so soon after the slice before that it does not count."""
    tenant: str
    """A client's name; of a tenant that a header names, a digest; empty: nobody said."""
    streamed: bool
    outcome: str
    attempts: int
    """How often it was sent; more than 1: an engine or a transfer failed."""
    route: str
    reason: str
    held_out: bool
    """Stayed although it would have been offloaded, to measure what that is worth."""
    prefill_cluster: str
    decode_cluster: str
    prompt_tokens: int
    uncached_tokens: int
    prefill_tokens: int
    """What the prefill instance had to compute."""
    answer_tokens: int | None
    predicted_s: float
    """Until the first token, from the decision on."""
    other_s: float | None
    """The same of the other way."""
    first_token_s: float | None
    """What came: until the first token, from the decision on; None: no stream, or none came."""
    ttft_s: float | None
    """The same from the arrival on."""
    total_s: float
    turn_s: float
    """Of it the wait for an instance that is free."""
    prefill_s: float
    """Until the prefill's answer, as measured; 0 where the decode instance prefills."""
    transfer_s: float
    """Until the decode instance had all KV, from the prefill's begin on."""
    kv_bytes: int
    """That moved between instances."""
    hidden_bytes: int
    """Of them those that were there when the prefill ended."""
    egress_bytes: int
    """That its transfers put on links between clusters, that of a cached prefix too. Of those that failed: none."""
    egress_cost: float
    """Price of `egress_bytes`, as the links' prices were then."""
    gpu_s: float
    """GPU-seconds of its prefill, as profiles say."""
    other_gpu_s: float | None
    gpu_cost: float
    """Price of `gpu_s`."""
    other_gpu_cost: float | None


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(LedgerEntry))
"""In the order of the fields."""
