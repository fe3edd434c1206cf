"""The template without vLLM: it imports a mark, and then does what its environment says."""

import os
import threading
import time
import uuid

from prfaas.serving.engines.vllm import template

MARK = uuid.uuid4().hex

if __name__ == "__main__":
    os.environ["MARK"] = MARK
    template._IMPORTED = ("json",)
    if "SLOW" in os.environ:
        time.sleep(600)
    if "BROKEN" in os.environ:
        raise RuntimeError("vLLM is of no use here")
    if "THREADED" in os.environ:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    template.main()
