"""vLLM's NIXL connector beside ours: which requests reach it, and what the gateway is told. No engine, no NIXL."""

import secrets
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.request import RequestStatus

from prfaas.core.deployment import TransferLimits
from prfaas.serving.engines.vllm.metadata import NixlRead
from prfaas.serving.engines.vllm.nixl_connector import PrfaasNixlConnector, TicketedNixlConnector
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.transport.protocol.handover import Handover, by_nixl, is_by_nixl, ticket_of
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest
from prfaas.serving.transport.protocol.wire import TransferPhase

LEASE_S = 40.0
KEY = secrets.token_bytes(32)
PROMPT = list(range(100, 140))
NIXL_SAYS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


@dataclass
class Request:
    request_id: str
    kv_transfer_params: Any
    prompt_token_ids: list[int]
    status: Any = RequestStatus.FINISHED_LENGTH_CAPPED
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None


class Nixl(TicketedNixlConnector):
    """What the joined connector asks of the real one; its memory and network are not there."""

    def __init__(self) -> None:
        self.refused = set()
        self.seen: list[Any] = []
        self.answers: tuple[bool, dict[str, Any] | None] = (False, None)
        self.results = KVConnectorTransferResults()
        self.allocated: list[int] = []

    def on_new_request(self, request: Any) -> None:
        self.seen.append(request.kv_transfer_params)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append(num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.answers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self.results = self.results, KVConnectorTransferResults()
        return results

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return "nixl's"


class Ours:
    """The same of our own connector."""

    def __init__(self) -> None:
        self.told: list[tuple[str, TransferPhase]] = []
        self.settings = SimpleNamespace(transfer=TransferLimits(lease_s=LEASE_S))
        self.seen: list[Any] = []

    on_new_request = Nixl.on_new_request

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0 or request.kv_transfer_params.get("prfaas")

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    start_load_kv, build_connector_meta = Nixl.start_load_kv, Nixl.build_connector_meta

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults()

    def _tell_pulled(self, pull: NixlRead, phase: TransferPhase) -> None:
        self.told.append((pull.request_id, phase))

    def _is_idle(self) -> bool:
        return False


@pytest.fixture
def joined() -> Any:
    """The connector of engine `home` with both children stood in for."""
    connector = object.__new__(PrfaasNixlConnector)
    nixl, ours = Nixl(), Ours()
    connector._connectors, connector._nixl, connector._ours = [nixl, ours], nixl, ours
    connector._requests_to_connector, connector._extra_async_saves = {}, {}
    connector._all_support_hma = True
    connector._name, connector._key = "home", KEY
    connector._handing, connector._pulling, connector._pulls, connector._open = {}, {}, [], {}
    return connector


def ticket(**changed: Any) -> str:
    fields = {"producer": "home", "consumer": "other", "num_tokens": len(PROMPT), "skip_tokens": 0}
    digest = prompt_digest(PROMPT)
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        **(fields | changed),
        prompt_digest=digest,
        expires_at_s=time.time() + 60,
    ).seal(KEY)


def to_read(left_s: float = 60.0) -> str:
    read = Handover(ticket(producer="other", consumer="home"), NIXL_SAYS, time.time() + left_s)
    return read.seal(KEY)


def step(connector: Any) -> None:
    """Orders of the scheduler side reach the worker side."""
    metadata = connector.build_connector_meta(SimpleNamespace())
    connector._connector_metadata = metadata
    connector.start_load_kv(None)


@pytest.mark.parametrize(
    "params",
    [
        NIXL_SAYS,
        {"do_remote_decode": True},
        {"prfaas": "nixl.abc", **NIXL_SAYS},
        {"prfaas": ["nixl.abc"]},
        {"prfaas": by_nixl(ticket(producer="else")), "do_remote_decode": True},
        {
            "prfaas": Handover(ticket(producer="other", consumer="home"), NIXL_SAYS, 2e9).seal(bytes(32)),
            **NIXL_SAYS,
        },
        {"prfaas": by_nixl(ticket(producer="other", consumer="home")), **NIXL_SAYS},
        "no object",
        None,
    ],
)
def test_what_no_gateway_has_sealed_reaches_nixl_never(joined: Any, params: Any) -> None:
    """Also when who sends it has reached the engine past the gateway."""
    joined.on_new_request(Request("r", params, PROMPT))
    assert joined._nixl.seen in ([{}], [None])


def test_tickets_of_our_own_transfers_go_to_our_connector(joined: Any) -> None:
    own = ticket()
    joined.on_new_request(
        Request("r", {"prfaas": own, "prfaas_from": "x", "do_remote_prefill": True, "y": 1}, PROMPT)
    )
    assert joined._ours.seen == [{"prfaas": own, "prfaas_from": "x"}]


def test_a_producer_hands_over_what_nixl_says(joined: Any) -> None:
    own = ticket()
    request = Request("r", {"prfaas": by_nixl(own), "prfaas_from": "x"}, list(PROMPT))
    joined.on_new_request(request)
    assert joined._nixl.seen == [{"do_remote_decode": True, "do_remote_prefill": False, "prfaas_from": "x"}]
    # Of hybrid models NIXL drops the last token of the request itself.
    del request.prompt_token_ids[-1]
    joined._nixl.answers = True, NIXL_SAYS
    held, told = joined.request_finished_all_groups(request, ([1, 2],))
    assert held and set(told) == {"prfaas"} and is_by_nixl(told["prfaas"])
    handed = Handover.unseal(told["prfaas"], KEY)
    assert (handed.ticket, handed.params) == (own, NIXL_SAYS)
    assert 0 < handed.expires_at_s - time.time() <= LEASE_S
    assert ticket_of(told["prfaas"]) == own
    # Once.
    assert joined.request_finished_all_groups(request, ([1, 2],)) == (True, None)


def test_a_producer_hands_no_other_prompts_kv_over(joined: Any) -> None:
    joined.on_new_request(Request("r", {"prfaas": by_nixl(ticket())}, PROMPT[::-1]))
    assert joined._nixl.seen == [{}]


def test_an_aborted_prefill_hands_nothing_over(joined: Any) -> None:
    request = Request("r", {"prfaas": by_nixl(ticket())}, PROMPT, RequestStatus.FINISHED_ABORTED)
    joined.on_new_request(request)
    joined._nixl.answers = False, NIXL_SAYS
    assert joined.request_finished_all_groups(request, ([1],)) == (False, None)


@pytest.mark.parametrize("fails", [False, True])
def test_the_gateway_hears_what_becomes_of_a_read(joined: Any, fails: bool) -> None:
    request = Request("r", {"prfaas": to_read(), "do_remote_prefill": True}, PROMPT)
    joined.on_new_request(request)
    assert joined._nixl.seen == [NIXL_SAYS]
    joined._requests_to_connector["r"] = 0
    joined.update_state_after_alloc(request, None, len(PROMPT) - 1)
    step(joined)
    assert joined._ours.told == [("r", TransferPhase.RECEIVING)]
    assert joined.get_transfer_results(set()).finished_recving == set()
    joined._nixl.results = KVConnectorTransferResults(
        finished_recving={"r", "another"}, failed_recving={"r"} if fails else set()
    )
    results = joined.get_transfer_results(set())
    assert results.finished_recving == {"r", "another"}
    ended = TransferPhase.FAILED if fails else TransferPhase.COMPLETE
    assert joined._ours.told[1:] == [("r", ended)]
    # It is told once, whatever vLLM does with the request afterwards.
    joined.update_state_after_alloc(request, None, 0)
    joined.request_finished_all_groups(request, ([1],))
    step(joined)
    assert len(joined._ours.told) == 2


@pytest.mark.parametrize("left_s", [-1.0, 4.0])
def test_what_was_read_after_the_lease_is_computed_again(joined: Any, left_s: float) -> None:
    """The producer may have given its blocks to others by then, and NIXL does not see that. Clocks may differ."""
    request = Request("r", {"prfaas": to_read(left_s)}, PROMPT)
    joined.on_new_request(request)
    joined._requests_to_connector["r"] = 0
    joined.update_state_after_alloc(request, None, len(PROMPT) - 1)
    step(joined)
    joined._nixl.results = KVConnectorTransferResults(finished_recving={"r"})
    results = joined.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert joined._ours.told[-1] == ("r", TransferPhase.FAILED)


def test_who_holds_the_whole_prompt_reads_nothing(joined: Any) -> None:
    request = Request("r", {"prfaas": to_read()}, PROMPT)
    joined.on_new_request(request)
    joined.update_state_after_alloc(request, None, 0)
    step(joined)
    assert joined._ours.told == [("r", TransferPhase.COMPLETE)]


def test_a_request_that_ends_before_its_read_is_told_of(joined: Any) -> None:
    request = Request("r", {"prfaas": to_read()}, PROMPT, RequestStatus.FINISHED_ABORTED)
    joined.on_new_request(request)
    joined.request_finished_all_groups(request, ([],))
    step(joined)
    assert joined._ours.told == [("r", TransferPhase.FAILED)]


def test_another_prompt_reads_nothing_but_frees_the_producers_blocks(joined: Any) -> None:
    """vLLM announces a refused request once more with the prompt [0]."""
    request = Request("r", {"prfaas": to_read()}, [0])
    joined.on_new_request(request)
    # NIXL gets the parameters, since it is NIXL that tells the producer; but no token is offered.
    assert joined._nixl.seen == [NIXL_SAYS]
    assert joined._nixl.get_num_new_matched_tokens(request, 0) == (0, False)
    joined.update_state_after_alloc(request, None, 0)
    step(joined)
    assert joined._ours.told == [("r", TransferPhase.FAILED)]
    joined.request_finished_all_groups(request, ([],))
    assert joined._nixl.refused == set()


def test_counters_are_rebuilt_without_vllms_list_of_connectors() -> None:
    """They cross from the engine's process as plain data; ours is no connector that vLLM knows by name."""
    ours, nixl = ConnectorStats(), NixlKVConnectorStats()
    ours.add("loads_completed")
    nixl.record_failed_transfer()
    told = {"PrfaasConnector": ours.data, "TicketedNixlConnector": nixl.data}
    rebuilt = PrfaasNixlConnector.build_kv_connector_stats(told)
    assert rebuilt is not None
    assert rebuilt.data["PrfaasConnector"].data == ours.data
    assert rebuilt.data["TicketedNixlConnector"].data == nixl.data
    assert PrfaasNixlConnector.build_kv_connector_stats() is not None
