"""Liveness of a producer's peer: connections to close after a timeout, and transfers to give up."""

from collections.abc import Collection, Iterable, Mapping

from prfaas.serving.transport.protocol.in_flight import InFlightWindow
from prfaas.serving.transport.protocol.liveness import (
    HEARTBEAT_BYTES,
    LookClock,
    TcpInfo,
    heartbeat_period_s,
    path_timeout_s,
)
from prfaas.serving.transport.protocol.options import SenderOptions
from prfaas.serving.transport.protocol.outgoing import Carrier, OutgoingTransfer, SendPhase


class PeerLiveness:
    """Judges a peer queue's peer by the liveness of its connections."""

    def __init__(self, peer_name: str, options: SenderOptions, now_s: float) -> None:
        self._peer_name = peer_name
        self._options = options
        self._clock = LookClock(now_s)
        self._dark_s = 0.0
        self._stuck_s = 0.0
        self.silent = ""
        """Why the path to the peer was given up; empty while there is one."""
        self.stalled = ""
        """Why the peer counts as stalled: its machine answers, its engine does not. Empty otherwise."""

    def begin(self, now_s: float) -> None:
        """Start anew: a first transfer is opened."""
        self._clock.elapsed_s(now_s)
        self._dark_s = self._stuck_s = 0.0

    def connected(self) -> None:
        """Note that a connection is up."""
        self._dark_s = 0.0
        self.silent = self.stalled = ""

    def progressed(self) -> None:
        """Note that the peer has accepted or acknowledged something."""
        self._stuck_s = 0.0

    def look(
        self, now_s: float, windows: Collection[InFlightWindow], infos: Mapping[Carrier, TcpInfo]
    ) -> dict[Carrier, str]:
        """Update the silence of all connections and of the peer.

        Args:
            now_s: now.
            windows: of the connections that are up.
            infos: the kernel's counters of them now.

        Returns:
            The reason to close, by connection.
        """
        options = self._options
        elapsed_s = self._clock.elapsed_s(now_s)
        spare_s = heartbeat_period_s(options.limits.silence_s)
        self._stuck_s += elapsed_s
        closing: dict[Carrier, str] = {}
        for window in windows:
            info, liveness = infos.get(window.connection), window.liveness
            if info is None:
                continue
            before = liveness.bytes_acked
            liveness.look(info, elapsed_s, asked=window.awaits_answer, spare_s=spare_s)
            if info.bytes_acked - before > HEARTBEAT_BYTES:
                self._stuck_s = 0.0
            if liveness.path_s > path_timeout_s(options.limits.silence_s):
                closing[window.connection] = f"nothing has come back from it for {liveness.path_s:.1f} s"
            elif liveness.engine_s > options.limits.progress_deadline_s:
                closing[window.connection] = (
                    f"its machine acknowledges, its engine has taken nothing for {liveness.engine_s:.1f} s"
                )
        path_s = [window.liveness.path_s for window in windows]
        self._dark_s = min(path_s) if path_s else self._dark_s + elapsed_s
        engine_s = min((window.liveness.engine_s for window in windows), default=0.0)
        late = engine_s > options.limits.silence_s
        self.stalled = f"its engine has not answered for {engine_s:.1f} s" if late else ""
        if self._dark_s > options.limits.resume_s:
            self.silent = f"nothing has come back from it for {self._dark_s:.1f} s"
        return closing

    def overdue(
        self, now_s: float, transfers: Iterable[OutgoingTransfer], up: bool, trouble: str
    ) -> list[tuple[OutgoingTransfer, str]]:
        """Transfers that must end now, each with the reason; call `look` before.

        Args:
            now_s: now.
            transfers: all that are open.
            up: the peer has a connection.
            trouble: why the last connection failed.
        """
        options = self._options
        transfers = list(transfers)
        overdue: list[tuple[OutgoingTransfer, str]] = []
        unfinished = False
        for transfer in transfers:
            age_s = now_s - transfer.opened_at_s
            if not up and min(age_s, self._dark_s) > options.limits.resume_s:
                overdue.append((transfer, f"{self._peer_name} unreachable: {trouble or 'no answer'}"))
            elif transfer.phase is not SendPhase.OPENING:
                unfinished |= transfer.ended or transfer.acked_bytes < transfer.put_bytes
            elif age_s > options.accept_deadline_s:
                limit_s = options.accept_deadline_s
                overdue.append((transfer, f"{self._peer_name} did not accept within {limit_s:g} s"))
        # A transfer may wait long behind another's chunks: the progress of the whole queue counts.
        if not unfinished:
            self._stuck_s = 0.0
        elif self._stuck_s > options.transfer_deadline_s:
            overdue = [(each, f"no progress for {options.transfer_deadline_s:g} s") for each in transfers]
        return overdue
