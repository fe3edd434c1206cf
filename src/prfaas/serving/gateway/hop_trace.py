"""The spans of one prefill elsewhere and of the KV transfer beside it."""

import asyncio
from collections.abc import Mapping

from prfaas.serving.control.plane import LivePlane
from prfaas.serving.gateway.kv_transfer import TransferredBytes, TransferSpec
from prfaas.serving.gateway.request_trace import CANCELLED, AttributeValue, RequestSpans


class HopTrace:
    """The two spans begin together, and each ends by itself."""

    def __init__(self, trace: RequestSpans, spec: TransferSpec, plane: LivePlane) -> None:
        producer, consumer = (
            plane.members.instance(spec.producer).cluster,
            plane.members.instance(spec.consumer).cluster,
        )
        self._spec = spec
        self._links = plane.links
        self._resent_bytes = plane.links.resent_bytes(spec.producer, spec.consumer)
        purpose = "prefix" if spec.attributes.service.background else "request"
        self._prefill = trace.open(
            "prefill",
            {
                "prfaas.instance": spec.producer,
                "prfaas.cluster": producer,
                "prfaas.prompt_tokens": len(spec.token_ids),
                "prfaas.kv.purpose": purpose,
            },
            asks_engine=True,
        )
        self._transfer = trace.open(
            "kv_transfer",
            {
                "prfaas.kv.producer": spec.producer,
                "prfaas.kv.consumer": spec.consumer,
                "prfaas.kv.link": producer if producer == consumer else f"{producer}->{consumer}",
                "prfaas.kv.skip_tokens": spec.skip_tokens,
                "prfaas.kv.expected_bytes": spec.kv_bytes,
                "prfaas.kv.purpose": purpose,
            },
        )

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """For the producer, whose own spans become children of the prefill."""
        return {**headers, "traceparent": self._prefill.traceparent}

    def prefilled(self, cached_tokens: int | None) -> None:
        """The producer has answered. `cached_tokens`: what it reused, by its own word."""
        if cached_tokens is not None:
            self._prefill.tell({"gen_ai.usage.cache_read.input_tokens": cached_tokens})
        self._prefill.end()

    def arrived(self, arrival: "asyncio.Task[TransferredBytes]") -> None:
        """The transfer is over; a failed one's span is left for `failed`, which knows why."""
        if arrival.cancelled() or arrival.exception() is not None:
            return
        moved = arrival.result()
        told: dict[str, AttributeValue] = {
            "prfaas.kv.bytes": moved.total_bytes,
            "prfaas.kv.wire_bytes": moved.total_bytes - moved.spared_bytes,
            "prfaas.kv.overlapped_bytes": moved.overlapped_bytes,
            "prfaas.kv.overlapped_fraction": moved.overlapped_fraction,
        }
        now_bytes = self._links.resent_bytes(self._spec.producer, self._spec.consumer)
        if self._resent_bytes is not None and now_bytes is not None:
            # The count starts again with the producer's process.
            told["prfaas.kv.link_resent_bytes"] = max(now_bytes - self._resent_bytes, 0)
        self._transfer.tell(told)
        self._transfer.end()

    def failed(self, reason: str, *, in_transfer: bool) -> None:
        """One of the two has failed, in one word; what is open of the other ends with it."""
        self._transfer.end(reason if in_transfer else CANCELLED)
        self._prefill.end(CANCELLED if in_transfer else reason)
