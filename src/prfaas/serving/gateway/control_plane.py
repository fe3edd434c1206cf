"""What the gateway asks of the control plane, and what it reports to it."""

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from prfaas.core.deployment import Instance
from prfaas.core.prefix import PromptChains
from prfaas.core.scheduling import Decision
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.own_process import LoopClock


class PrefillWork(Protocol):
    """A prefill elsewhere that is under way."""

    @property
    def left_s(self) -> float:
        """Seconds until its last byte has left, as was predicted when it began; below 0: it takes longer."""
        ...

    def measured(self) -> None:
        """The prefill and its transfer went well: its time counts as a measurement."""
        ...


class LinkWords(Protocol):
    """What the senders of links have told of them lately."""

    def resent_bytes(self, producer: str, consumer: str) -> int | None:
        """Bytes that the kernels of `producer` have sent again on the link to `consumer`, all transfers' together.

        None: both are in one cluster, or nothing is known.
        """
        ...


class CheckpointJudge(Protocol):
    """Weighs what it costs a prefill instance to send checkpoints."""

    def checkpoint_tokens(self, decision: Decision) -> int:
        """About how many tokens the prefill computes between two checkpoints (see `checkpoints`); 0: it sends none."""
        ...


class ControlPlane(Protocol):
    """The live control plane as the gateway uses it. All methods but `chains` belong to the event loop's thread."""

    def chains(self, token_ids: Sequence[int], salt: str, adapter: str) -> PromptChains:
        """What the cached prefixes of a prompt are looked up by. May be called in a thread."""
        ...

    def route(
        self,
        num_tokens: int,
        chains: PromptChains | None,
        *,
        avoid: Collection[str] = (),
        offload: bool = True,
        first_from_prefill: bool = False,
    ) -> Decision:
        """Decide where a prompt of `num_tokens` tokens goes.

        Args:
            chains: None when the prompt was not looked at. The decision is then a decode instance that
                prefills itself.
            avoid: instances that have failed this request.
            offload: False: never to another cluster.
            first_from_prefill: where another instance prefills, the client has its first token from there.

        Raises:
            NoDecodeInstanceError: no instance can decode.
        """
        ...

    def wait_s(self, decision: Decision | None) -> float:
        """Seconds, as predicted, until the work of `decision` could begin at its prefill and its decode instance.

        None: the least of all instances, which the next request waits at any rate.
        """
        ...

    def answer_s(self, decode: str, max_tokens: int | None) -> float:
        """Seconds from an answer's first token to its last, as predicted; 0 where nothing is known of that yet.

        `max_tokens`: what the client allows; None: it does not say.
        """
        ...

    def instance(self, name: str) -> Instance:
        """The instance called `name`, which a decision has named."""
        ...

    def own_last_tokens(self, name: str) -> int:
        """How many last tokens of a prompt an instance computes itself, whatever is moved to it; at least 1."""
        ...

    def admit(self, decision: Decision, chains: PromptChains) -> AbstractAsyncContextManager[Decision]:
        """Wait until the prefill of `decision` is next, and hold its instance for it.

        Yields the decision with the instance that was free first, which may be another one of the same cluster.
        """
        ...

    def planned(self, decision: Decision) -> AbstractContextManager[None]:
        """While a decision is about to be carried out, and something else is waited for: its instances must stay."""
        ...

    def prefilling(self, decision: Decision) -> AbstractContextManager[PrefillWork]:
        """While a prefill elsewhere and its transfers are under way.

        An exit after `PrefillWork.measured` is a measurement of service time. One without it tells nothing: neither
        a measurement nor a failure. An exit by an exception marks the way as failed.
        """
        ...

    def decoding(self, name: str, tokens: int, reused_tokens: int = 0) -> AbstractContextManager[None]:
        """While a request is open at its decode instance, which also prefills `tokens` tokens of it, behind
        `reused_tokens` that it has."""
        ...

    def expect(self, name: str, chains: PromptChains) -> None:
        """The instance will soon hold this prompt in its cache."""
        ...

    def observe(self, num_tokens: int, uncached_tokens: int) -> None:
        """One request as the scheduler's statistics should see it; called once per request."""
        ...

    def suspect(self, name: str, reason: str, *, lost_cache: bool = False) -> None:
        """A request failed at `name`: take it out of routing until a probe succeeds.

        `lost_cache`: the instance died or restarted, so it holds no prefixes any more. Silence is no reason for that.
        """
        ...

    @property
    def listeners(self) -> Listeners:
        """Who is told when an instance is frozen or gets notice, and when a path is given up."""
        ...

    @property
    def loop_clock(self) -> LoopClock:
        """Time in which the event loop is on time: what engines' answers are measured by."""
        ...

    @property
    def links(self) -> LinkWords:
        """The links between clusters."""
        ...

    @property
    def waits(self) -> CheckpointJudge:
        """What requests will wait for, and what follows from that."""
        ...

    def drain(self, name: str, *, wanted: bool) -> None:
        """Let nothing new go to the instance called `name`, which the deployment has; or let it take part again."""
        ...

    def give_notice(self, name: str, notice_s: float) -> None:
        """The instance called `name` is taken away in so many seconds.

        It begins only what it ends until then, and gets nothing more from then on. `listeners.noticed` are told. It
        takes part again when another process answers in its place, or with `drain(name, wanted=False)`.
        """
        ...

    def hold_threshold(self, cluster: str, tokens: float | None) -> None:
        """Set a PD cluster's threshold until told otherwise; None: let it be searched again.

        Raises:
            ValueError: the policy reads no such threshold; the text says what it does instead.
        """
        ...

    def incompatible(self, producer: str, consumer: str) -> str | None:
        """Why `consumer` takes no KV from `producer`, in the words of its rejection; None where none is known.

        Such a pair is never decided for, until one of the two restarts.
        """
        ...

    async def ask_incompatible(self, producer: str, consumer: str) -> str | None:
        """The same, after asking the producer, which takes two seconds at most."""

    def idle_decode_instance(self) -> str | None:
        """A healthy instance that decodes and has nothing to do; None if there is none."""
        ...

    def is_used(self, name: str) -> bool:
        """Whether a request is open at the instance, or on its way there."""
        ...

    def state(self) -> dict[str, Any]:
        """The deployment as it is now, ready for JSON: what `GET /prfaas/state` answers.

        `state()["clusters"][cluster]["instances"][name]` has at least `role` ("prefill", "decode" or both with a
        "+"), `healthy` and `drain` (None, "draining" or "drained"), from which `GET /health` is made.
        """
        ...

    async def run(self) -> None:
        """All loops, until cancelled."""
        ...

    async def close(self) -> None:
        """Give back connections and threads; after `run` has ended."""
        ...
