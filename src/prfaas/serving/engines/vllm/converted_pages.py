"""Wire pages whose elements have half the bytes of those in the engine's memory: rounded and widened on the way.

The copies are those of pages on a device, which do the same in host memory.
"""

import torch

from prfaas.serving.engines.page_digests import WORD_BYTES
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.pages import BlockIds

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class ConvertedPages(DevicePages):
    """Pages that an engine keeps in 16 bits an element, and another one in 8.

    Rounding goes to the nearest element, and to the largest one beyond it, as the kernels of GPUs do. What was widened
    rounds to what it was, so digests are those of the narrow pages at both sides.
    """

    def __init__(self, wide: DevicePages, kept: str, travels: str) -> None:
        """
        Args:
            wide: the engine's wire pages.
            kept: its elements; one of `dtypes.ELEMENT_BYTES`, with two bytes.
            travels: those of the wire, with one byte.
        """
        super().__init__(wide.raw, wide.page_bytes // 2)
        self._wide = wide
        self._kept, self._travels = _DTYPES[kept], _DTYPES[travels]
        self._largest = torch.finfo(self._travels).max

    def _run(self, blocks: BlockIds) -> torch.Tensor:
        return self._narrow(self._wide._run(blocks))

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        pages = self._narrow(self._wide._gather(blocks)).view(len(blocks), -1)
        return pages if self.page_bytes % WORD_BYTES else pages.view(torch.int64)

    def _put(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        self._wide._put(blocks, pages.view(self._travels).to(self._kept).view(torch.uint8))

    def _page(self, block: int) -> torch.Tensor:
        return self._narrow(self._wide._page(block))

    def _narrow(self, pages: torch.Tensor) -> torch.Tensor:
        """Bytes one behind the other."""
        elements = pages.view(torch.uint8).view(self._kept).flatten()
        return elements.clamp(-self._largest, self._largest).to(self._travels).view(torch.uint8)
