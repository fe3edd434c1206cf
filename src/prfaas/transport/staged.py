"""A complete transfer in staging, owned by the engine from `take` to `free`."""

from collections.abc import Callable, Sequence

from prfaas.transport.staging import StagingLease


class StagedTransfer:
    """The verified bytes of every region of one transfer."""

    def __init__(
        self,
        *,
        transfer_id: bytes,
        num_tokens: int,
        skip_tokens: int,
        prompt_digest: bytes,
        region_starts: Sequence[int],
        region_bytes: Sequence[int],
        lease: StagingLease,
        on_free: Callable[[], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.num_tokens = num_tokens
        self.skip_tokens = skip_tokens
        self.prompt_digest = prompt_digest
        self.region_bytes = tuple(region_bytes)
        self._region_starts = region_starts
        self._lease = lease
        self._on_free = on_free

    def region_views(self, region: int, offset: int, nbytes: int) -> list[memoryview]:
        """Pieces that together are bytes [offset, offset + nbytes) of `region`, in order.

        Raises ValueError outside the region, RuntimeError once freed. Region starts are 64-byte aligned in
        staging, pieces end at transfer-block boundaries. No piece may be used after `free`.
        """
        if not 0 <= region < len(self.region_bytes):
            raise ValueError(f"region {region} is not one of the {len(self.region_bytes)} of this transfer")
        size = self.region_bytes[region]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError(f"range {offset}+{nbytes} lies outside region {region} of {size} bytes")
        return self._lease.views(self._region_starts[region] + offset, nbytes)

    def free(self) -> None:
        """Give the staging back and let waiting transfers in; a second call raises RuntimeError."""
        self._lease.free()
        self._on_free()
