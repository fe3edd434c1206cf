"""What every engine counts of its KV transfers: in the series `vllm:prfaas_<counter>_total`."""

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "sends_completed": "KV transfers that this engine sent and the other side acknowledged",
    "sends_failed": "KV transfers that this engine gave up sending",
    "leases_expired": "KV transfers given up because nobody acknowledged them within the lease",
    "bytes_sent": "KV bytes acknowledged by decode engines",
    "loads_completed": "KV transfers loaded from staging into the engine's blocks",
    "loads_failed": "KV transfers that could not be loaded; their requests were prefilled locally",
    "digest_mismatches": "KV transfers with a page that was not the one the prefill engine computed",
    "bytes_loaded": "KV bytes copied from staging into the engine's blocks",
}
"""Counter name → what it counts."""
