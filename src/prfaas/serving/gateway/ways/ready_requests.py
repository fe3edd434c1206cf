"""A request that its decode engine can answer now: one class for each way in which the prompt's KV gets there."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from prfaas.core.route_header import RouteHeader
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.prompts.prompt import DirectPrompt
from prfaas.serving.gateway.prompts.request import ServingRequest, TokenizedPrompt
from prfaas.serving.gateway.ways.first_token import SampledTokens
from prfaas.serving.gateway.ways.kv_transfer import KeptPart, MovedPrefix, StartedTransfer, TransferDone

FirstToken = Literal["prefill"]
Arriving = asyncio.Task["DecidedRequest"]
"""Ends when all KV is there, with what is known of it then. Raises HopFailedError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRequest(ABC):
    """What all of them have in common."""

    decision: Decision
    """As it was carried out."""
    prompt: TokenizedPrompt | DirectPrompt

    moves_kv: ClassVar[bool] = False
    """Whether KV of the prompt lies at the decode engine's staging, or is on its way."""

    @property
    @abstractmethod
    def request(self) -> ServingRequest:
        """Whose way this is."""

    @property
    def decode(self) -> str:
        """The decode instance."""
        return self.decision.decode

    @property
    def own_prefill_tokens(self) -> int:
        """Tokens that the decode engine prefills itself; 0 when it is not known, or none."""
        return 0 if self.moves_kv else self.decision.prefill_tokens

    @property
    def own_reused_tokens(self) -> int:
        """Tokens that the decode engine has of a prompt that it prefills itself; 0 when it is not known, or none."""
        return self.decision.reused_tokens if self.own_prefill_tokens else 0

    @property
    def reuse_ids(self) -> Sequence[int] | None:
        """The prompt's ids, where the decode engine may take them in place of what the client sent."""
        return None

    def kv_params(self) -> Json:
        """What the decode engine is told of the KV that waits for it."""
        return {}

    def given_up(self) -> StartedTransfer | None:
        """End what still brings KV. Returns the transfer whose staging is to be freed; None: there is none."""
        return None

    @abstractmethod
    def header(self) -> RouteHeader:
        """What the route header tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectRequest(ReadyRequest):
    """The decode engine gets it as it is, and prefills all of it."""

    prompt: DirectPrompt
    asked: ServingRequest

    @property
    def request(self) -> ServingRequest:
        return self.asked

    def header(self) -> RouteHeader:
        name, is_seen = self.decode, self.prompt.num_tokens > 0
        return RouteHeader(
            route=str(Route.LOCAL),
            prefill=name,
            decode=name,
            uncached_tokens=self.decision.uncached_tokens if is_seen else None,
            predicted_ttft_s=self.decision.predicted_ttft_s if is_seen else None,
            reason=self.prompt.reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRequest(ReadyRequest):
    """One whose way was decided by its prompt."""

    prompt: TokenizedPrompt
    prefix: MovedPrefix
    """What became of the cached prefix that was to move first."""
    first_token: FirstToken | None = None
    """Who has sampled the answer's first token before the decode instance was asked; None: it samples all."""
    fallback: str | None = None
    """Why an earlier prefill elsewhere failed, in one word."""

    @property
    def request(self) -> ServingRequest:
        return self.prompt.request

    @property
    def reuse_ids(self) -> Sequence[int] | None:
        return self.prompt.token_ids if self.prompt.takes_ids else None

    def header(self) -> RouteHeader:
        decision = self.decision
        return RouteHeader(
            route=str(decision.route),
            prefill=decision.prefill,
            decode=decision.decode,
            uncached_tokens=decision.uncached_tokens,
            threshold_tokens=decision.threshold_tokens,
            predicted_ttft_s=decision.predicted_ttft_s,
            prefix_source=self.prefix.source,
            prefix_bytes=self.prefix.moved_bytes,
            first_token=self.first_token,
            fallback=self.fallback,
            reason=decision.reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRequest(DecidedRequest):
    """The decode engine prefills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferredRequest(DecidedRequest):
    """The decode engine loads what a transfer brings."""

    moves_kv: ClassVar[bool] = True

    transfer: StartedTransfer

    def kv_params(self) -> Json:
        return self.transfer.params()

    def given_up(self) -> StartedTransfer | None:
        return self.transfer

    def header(self) -> RouteHeader:
        return replace(DecidedRequest.header(self), cached_tokens=self.transfer.ticket.skip_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRequest(TransferredRequest):
    """A transfer that broke: the decode engine prefills what is missing."""

    transfer: KeptPart

    @property
    def own_prefill_tokens(self) -> int:
        return self.decision.prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRequest(TransferredRequest):
    """All KV waits at the decode engine."""

    transfer: TransferDone

    def header(self) -> RouteHeader:
        done = self.transfer
        return replace(
            TransferredRequest.header(self),
            kv_bytes=done.moved.total_bytes,
            hidden_fraction=done.moved.overlapped_fraction,
            transfer_s=done.transfer_s,
            prefill_s=done.prefill_s,
            transfer="nixl" if done.by == "nixl" else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingRequest(TransferredRequest):
    """The KV is expected at the decode engine in a moment."""

    arriving: Arriving

    def given_up(self) -> StartedTransfer | None:
        return _ended(self.arriving) or self.transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PullingRequest(MovingRequest):
    """The decode engine reads the KV by NIXL as soon as it takes the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRequest(DecidedRequest):
    """The prefill instance has sampled the answer's first token, and the KV is on its way."""

    first_token: FirstToken | None = "prefill"
    first: SampledTokens
    arriving: Arriving
    soon: "asyncio.Future[StartedTransfer]"
    """Has the transfer that a decode request may name, once that may be sent."""

    moves_kv: ClassVar[bool] = True

    def given_up(self) -> StartedTransfer | None:
        return _ended(self.arriving)


def _ended(arriving: Arriving) -> StartedTransfer | None:
    """What has come already; None where it is cut off now, or has failed: then it frees what it left itself."""
    if arriving.cancel() or arriving.cancelled() or arriving.exception() is not None:
        return None
    return arriving.result().given_up()
