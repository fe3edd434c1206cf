"""Python runs this at its start in engines that have the folder on their path: no layer of attention calls the hook."""

import sys

# Not in helpers of such a process: they have nothing to import.
if "-m" in sys.orig_argv:
    from prfaas.serving.engines.vllm.connector import PrfaasConnector

    PrfaasConnector.save_kv_layer = lambda *_, **__: None  # type: ignore[method-assign]
