"""vLLM's NIXL connector beside ours, in engines of a PD cluster with `engine.local_transfer: nixl`.

vLLM's own NixlConnector connects to whatever address a request names. Here it acts on sealed tickets alone: a request
says nothing that NIXL takes as it is (`transport/handover.py`).
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.v1.core.sched.output import SchedulerOutput

from prfaas.serving.engines.vllm.connector import COMPLETED, PrfaasConnector
from prfaas.serving.engines.vllm.connector_scheduler import digest_of
from prfaas.serving.engines.vllm.metadata import NixlRead
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.protocol.handover import Handover, HandoverError, is_by_nixl, ticket_of
from prfaas.serving.transport.protocol.ticket import (
    KEPT_PARAMETER,
    PREFIX_TICKET_PARAMETER,
    TICKET_PARAMETER,
    Ticket,
    TicketError,
)
from prfaas.serving.transport.protocol.wire import TransferPhase

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# What may be said to our own connector. All other parameters of a request are dropped.
_OWN = {TICKET_PARAMETER: str, PREFIX_TICKET_PARAMETER: str, KEPT_PARAMETER: int}
# vLLM steps without rest while a load is open, and looks at it in each step.
_IDLE_STEP_S = 0.002
_CLOCKS_DIFFER_S = 5.0
"""By so much the clocks of two machines of a cluster may differ. vLLM's own margin for expired blocks is the same."""


class TicketedNixlConnector(NixlPullConnector):
    """vLLM's connector, for requests that `PrfaasNixlConnector` has let through."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.refused: set[str] = set()
        """Requests that must not load; their producers are still told to free what they hold."""

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id in self.refused:
            return 0, False
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return answer


@dataclass
class NixlMetadata(MultiKVConnectorMetadata):
    """One step's orders to both connectors."""

    pulls: Sequence[NixlRead] = field(default_factory=tuple)
    """What NIXL begins to load in this step, and what it does not load."""


@dataclass(slots=True)
class _Pull:
    """A request whose KV NIXL is to load."""

    ticket: Ticket
    expires_at_s: float
    refused: bool
    settled: bool = False
    """The load was ordered, or turned out not to be wanted."""


class PrfaasNixlConnector(MultiConnector):
    """Both connectors in one engine: NIXL first, ours for what comes from and goes to other clusters.

    vLLM's MultiConnector does the joining. What is added: NIXL's parameters come sealed, the gateway hears what becomes
    of a load as it hears it of our own, and counters are rebuilt without vLLM's list of connectors, which lacks ours.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._nixl = next(each for each in self._connectors if isinstance(each, TicketedNixlConnector))
        self._ours = next(each for each in self._connectors if isinstance(each, PrfaasConnector))
        self._name = self._ours.settings.name
        self._key = load_key(self._ours.settings.key_file)
        self._handing: dict[str, str] = {}
        self._pulling: dict[str, _Pull] = {}
        self._pulls: list[NixlRead] = []
        self._open: dict[str, NixlRead] = {}

    # ---- scheduler side

    def on_new_request(self, request: "Request") -> None:
        request.kv_transfer_params = self._params_of(request)
        super().on_new_request(request)

    def _params_of(self, request: "Request") -> dict[str, Any] | None:
        """What the connectors may read of a request's parameters."""
        given = request.kv_transfer_params
        if not isinstance(given, dict):
            return None
        own = {name: given[name] for name, kind in _OWN.items() if isinstance(given.get(name), kind)}
        text = own.get(TICKET_PARAMETER, "")
        if not is_by_nixl(text):
            return own
        del own[TICKET_PARAMETER]
        try:
            ticket = Ticket.unseal(ticket_of(text), self._key, time.time())
            if ticket.producer == self._name:
                return own | self._params_to_hand_over(request, ticket, ticket_of(text))
            if ticket.consumer == self._name:
                return own | self._params_to_pull(request, ticket, Handover.unseal(text, self._key))
        except (TicketError, HandoverError, UnicodeError) as error:
            logger.warning("request %s prefills locally: %s", request.request_id, error)
            return own
        logger.warning(
            "request %s prefills locally: its ticket is for %s and %s, this engine is %s",
            *(request.request_id, ticket.producer, ticket.consumer, self._name),
        )
        return own

    def _params_to_hand_over(self, request: "Request", ticket: Ticket, sealed: str) -> dict[str, Any]:
        if not _is_prompt_of(request, ticket):
            logger.warning("request %s: its prompt is not the one of its ticket", request.request_id)
            return {}
        self._handing[request.request_id] = sealed
        return {"do_remote_decode": True, "do_remote_prefill": False}

    def _params_to_pull(self, request: "Request", ticket: Ticket, handover: Handover) -> dict[str, Any]:
        # vLLM announces a request that it rejected, or that its client left early, once more with another prompt. Such
        # a one must load nothing, but its producer must learn that it may free the blocks.
        refused = not _is_prompt_of(request, ticket)
        self._pulling[request.request_id] = _Pull(ticket, handover.expires_at_s, refused)
        if refused:
            self._nixl.refused.add(request.request_id)
        return dict(handover.params)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        chosen = self._requests_to_connector.get(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        pull = self._pulling.get(request.request_id)
        if pull is None or pull.settled:
            return
        pull.settled = True
        loads = num_external_tokens > 0 and chosen == self._connectors.index(self._nixl)
        end_tokens = pull.ticket.num_tokens
        local_tokens = max(end_tokens - num_external_tokens, 0) if loads else end_tokens
        self._order(request.request_id, pull, end_tokens, local_tokens, refused=pull.refused)

    def _order(
        self, request_id: str, pull: _Pull, num_tokens: int, local_tokens: int, *, refused: bool
    ) -> None:
        transfer_id, expires_at_s = pull.ticket.transfer_id, pull.expires_at_s
        read = NixlRead(request_id, transfer_id, num_tokens, local_tokens, expires_at_s, refused=refused)
        self._pulls.append(read)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlMetadata:
        both = super().build_connector_meta(scheduler_output)
        pulls, self._pulls = self._pulls, []
        return NixlMetadata(both.metadata, both.extra_async_saves, pulls)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Before NIXL's own clock begins: the blocks are kept for longer than is told.
        expires_at_s = time.time() + self._ours.settings.transfer.lease_s
        held, params = super().request_finished_all_groups(request, block_ids)
        request_id = request.request_id
        sealed, pull = self._handing.pop(request_id, None), self._pulling.pop(request_id, None)
        self._nixl.refused.discard(request_id)
        if pull is not None and not pull.settled:
            self._order(request_id, pull, pull.ticket.num_tokens, 0, refused=True)
        if sealed is None or params is None or request.status not in COMPLETED:
            return held, None
        return held, {TICKET_PARAMETER: Handover(sealed, params, expires_at_s).seal(self._key)}

    # ---- worker side

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NixlMetadata)
        for pull in metadata.pulls:
            if pull.loads:
                self._open[pull.request_id] = pull
                self._ours._tell_pulled(pull, TransferPhase.RECEIVING)
            else:
                self._ours._tell_pulled(
                    pull, TransferPhase.FAILED if pull.refused else TransferPhase.COMPLETE
                )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving & self._open.keys():
            read = self._open.pop(request_id)
            if time.time() > read.expires_at_s - _CLOCKS_DIFFER_S:
                # NIXL reads on, and takes whatever is there: the KV of the request that has the blocks now.
                logger.warning("request %s prefills locally: it was read after its lease", request_id)
                results.failed_recving.add(request_id)
            has_failed = request_id in results.failed_recving
            self._ours._tell_pulled(read, TransferPhase.FAILED if has_failed else TransferPhase.COMPLETE)
        if self._open and not results.finished_recving and self._ours._is_idle():
            time.sleep(_IDLE_STEP_S)
        return results

    # ---- statistics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        rebuilt: dict[str, KVConnectorStats] = {}
        for name, told in (data or {}).items():
            stats = (
                told if isinstance(told, KVConnectorStats) else _child(name).build_kv_connector_stats(told)
            )
            if stats is not None:
                rebuilt[name] = stats
        return MultiKVConnectorStats(data=rebuilt)


@functools.cache
def _child(name: str) -> type[KVConnectorBase_V1]:
    children: tuple[type[KVConnectorBase_V1], ...] = (PrfaasConnector, TicketedNixlConnector)
    return next(each for each in children if each.__name__ == name)


def _is_prompt_of(request: "Request", ticket: Ticket) -> bool:
    prompt = request.prompt_token_ids
    return (
        prompt is not None
        and len(prompt) == ticket.num_tokens
        and digest_of(request, prompt) == ticket.prompt_digest
    )
