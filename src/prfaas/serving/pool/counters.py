"""What a pool's store has done since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class PoolCounters:
    """What a store did since its start."""

    lookups: int = 0
    pinned_matches: int = 0
    hit_memory_tokens: int = 0
    hit_ssd_tokens: int = 0
    stored_pages: int = 0
    stored_bytes: int = 0
    refused_pages: int = 0
    """There was no room: everything was in use."""
    aborted_pages: int = 0
    evicted_pages: int = 0
    evicted_bytes: int = 0
    promoted_pages: int = 0
    promoted_bytes: int = 0
    failed_promotions: int = 0
    recovered_pages: int = 0
    wrong_pages: int = 0
    """Their bytes did not have their checksums."""
