"""Counters of every engine's KV transfers: the series `vllm:prfaas_<counter>_total`."""

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "sends_completed": "KV transfers that this engine sent and the other side acknowledged",
    "sends_failed": "KV transfers that this engine gave up sending",
    "leases_expired": "KV transfers given up because nobody acknowledged them within the lease",
    "bytes_sent": "KV bytes acknowledged by decode engines",
    "checkpoints_sent": "Checkpoints of states and windows, put on their way while a prefill went on",
    "loads_completed": "KV transfers loaded from staging into the engine's blocks",
    "loads_failed": "KV transfers that could not be loaded; their requests were prefilled locally",
    "loads_resumed": "KV transfers that broke, of which the decode engine loaded what had come",
    "digest_mismatches": "KV transfers with a page that was not the one the prefill engine computed",
    "bytes_loaded": "KV bytes copied from staging into the engine's blocks",
}
"""Counter name → what it counts."""

POOL_COUNTERS: Mapping[str, str] = {
    "pool_hit_tokens_memory": "Prompt tokens whose KV the machine's pool held in memory",
    "pool_hit_tokens_ssd": "Prompt tokens whose KV the machine's pool had to read from its SSD",
    "pool_loads_completed": "Prefixes loaded from the machine's pool into the engine's blocks",
    "pool_loads_failed": "Prefixes that could not be loaded from the machine's pool; their requests were prefilled",
    "pool_bytes_loaded": "KV bytes copied from the machine's pool into the engine's blocks",
    "pool_load_seconds": "Seconds spent on these copies",
    "pool_bytes_stored": "KV bytes copied from the engine's blocks into the machine's pool",
    "pool_store_seconds": "Seconds spent on these copies",
}
"""The same of an engine's part of its machine's pool."""
