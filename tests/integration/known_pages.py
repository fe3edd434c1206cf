"""For engines that keep KV otherwise than each other, where vLLM would lay pages out in an order that is not known."""

from pathlib import Path

from .shimmed import with_shims


def with_known_pages(*shims: str) -> dict[str, str]:
    """Environment of engines that keep KV otherwise than each other, with these folders of the tests on the path.

    Where there is AMX, vLLM lays pages out in an order that prfaas does not know, and such engines refuse each other;
    so vLLM is told that there is none.
    """
    if " amx_tile" in Path("/proc/cpuinfo").read_text():
        shims = (*shims, "without_amx")
    return with_shims(*shims)
