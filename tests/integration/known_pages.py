"""For engines that keep KV otherwise than each other, where vLLM would lay pages out in an order that is not known."""

import os
from pathlib import Path


def with_known_pages() -> dict[str, str]:
    """Environment of engines that keep KV otherwise than each other.

    Where there is AMX, vLLM lays pages out in an order that prfaas does not know, and such engines refuse each other;
    so vLLM is told that there is none.
    """
    if " amx_tile" not in Path("/proc/cpuinfo").read_text():
        return {}
    folders = [str(Path(__file__).with_name("without_amx")), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
