"""The ledger: a bounded SQLite file with a row for each request that was routed (`core/ledger.py`)."""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import astuple

from prfaas.core.deployment import Deployment, LedgerConfig
from prfaas.core.ledger import COLUMNS, LedgerEntry
from prfaas.core.scheduling.decision import HELD_OUT, Route
from prfaas.core.scheduling.view import View
from prfaas.core.units import GB
from prfaas.serving.gateway.request_log import RequestRecord
from prfaas.serving.ledger_file import BUSY_S, open_ledger
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)

_WRITE_S = 1.0
_DROP_S = 60.0
# What a disk that stands still may keep in memory: some 40 MB.
_MOST_UNWRITTEN = 50_000
_DAY_S = 86_400.0
_INSERT = f"INSERT INTO requests VALUES ({', '.join('?' * len(COLUMNS))})"


class Entries:
    """Makes rows of records, with the prices of the deployment that runs."""

    def __init__(self, running: RunningDeployment, view: View) -> None:
        """`view`: has the times of prefills, as the control plane knows them now."""
        self._running = running
        self._view = view
        self._read(running.current)

    def _read(self, deployment: Deployment) -> None:
        self._of = deployment
        self._places = {
            each.name: (cluster.name, cluster.gpus_per_instance or each.gpus)
            for cluster in deployment.clusters
            for each in cluster.instances
        }
        self._per_byte = {(link.source, link.target): link.egress_per_gb / GB for link in deployment.links}

    def of(self, record: RequestRecord, total_s: float) -> LedgerEntry | None:
        """The row of a request that has ended; None: it was never routed."""
        if not record.attempts or record.prompt_tokens is None:
            return None
        if self._of is not self._running.current:
            self._read(self._running.current)
        steps, decision = record.steps_s, record.attempts[0].decision
        other, prompt_tokens = decision.other, record.prompt_tokens
        source, target = (self._places.get(name, ("", 0))[0] for name in (decision.prefill, decision.decode))
        kv_bytes = hidden_bytes = egress_bytes = 0
        for attempt in record.attempts:
            if attempt.moved is not None:
                kv_bytes += attempt.moved.total_bytes
                hidden_bytes += attempt.moved.overlapped_bytes
                if attempt.decision.route is Route.OFFLOAD:
                    egress_bytes += attempt.moved.total_bytes - attempt.moved.spared_bytes
        ttft_s = steps.get("first_byte") if record.streamed else None
        gpu_s, gpu_cost = self._gpu(decision.prefill, decision.prefill_tokens, prompt_tokens)
        other_gpu_s = other_gpu_cost = None
        if other is not None:
            other_gpu_s, other_gpu_cost = self._gpu(other.prefill, other.prefill_tokens, prompt_tokens)
        return LedgerEntry(
            at_s=record.at_s,
            request_id=record.request_id,
            tenant=record.tenant,
            streamed=record.streamed,
            outcome=record.outcome,
            attempts=len(record.attempts),
            route=str(decision.route),
            reason=decision.reason,
            held_out=decision.reason == HELD_OUT,
            prefill_cluster=source,
            decode_cluster=target,
            prompt_tokens=prompt_tokens,
            uncached_tokens=decision.uncached_tokens,
            prefill_tokens=decision.prefill_tokens,
            answer_tokens=record.generated_tokens,
            predicted_s=decision.first_token_s,
            other_s=None if other is None else other.first_token_s,
            first_token_s=None if ttft_s is None else max(ttft_s - record.starts_s.get("decide", 0.0), 0.0),
            ttft_s=ttft_s,
            total_s=total_s,
            turn_s=steps.get("turn", 0.0),
            prefill_s=steps.get("prefill", 0.0),
            transfer_s=steps.get("transfer", 0.0),
            kv_bytes=kv_bytes,
            hidden_bytes=hidden_bytes,
            egress_bytes=egress_bytes,
            egress_cost=egress_bytes * self._per_byte.get((source, target), 0.0),
            gpu_s=gpu_s,
            other_gpu_s=other_gpu_s,
            gpu_cost=gpu_cost,
            other_gpu_cost=other_gpu_cost,
        )

    def _gpu(self, instance: str, prefill_tokens: int, prompt_tokens: int) -> tuple[float, float]:
        """GPU-seconds of such a prefill there, and their price."""
        name, gpus = self._places.get(instance, ("", 0))
        cluster = self._view.clusters.get(name)
        if cluster is None:
            return 0.0, 0.0
        seconds = cluster.after_prefix_s(prefill_tokens, max(prompt_tokens - prefill_tokens, 0))
        return seconds * gpus, seconds * cluster.instance_price_per_s


class Ledger:
    """Writes rows in a thread of its own, a second's worth at a time. What it can't write is lost and counted."""

    def __init__(self, config: LedgerConfig, entries: Entries, on_lost: Callable[[int], None]) -> None:
        """
        Args:
            config: of the file.
            entries: make the rows.
            on_lost: told how many rows were lost.

        Raises:
            LedgerFileError: the file can't be used.
        """
        self._config = config
        self._entries = entries
        self._on_lost = on_lost
        self._rows: deque[LedgerEntry] = deque()
        self._ended = threading.Event()
        open_ledger(config.file).close()
        self._thread = threading.Thread(target=self._write, name="prfaas-ledger", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord, total_s: float) -> None:
        """Keep what became of a request."""
        if len(self._rows) >= _MOST_UNWRITTEN:
            self._on_lost(1)
            return
        entry = self._entries.of(record, total_s)
        if entry is not None:
            self._rows.append(entry)

    def close(self) -> None:
        """Write what is left."""
        self._ended.set()
        self._thread.join(BUSY_S)

    def _write(self) -> None:
        """Until it is closed."""
        connection, dropped_s = open_ledger(self._config.file), 0.0
        ends = False
        while not ends:
            ends = self._ended.wait(_WRITE_S)
            rows = [astuple(self._rows.popleft()) for _ in range(len(self._rows))]
            try:
                with connection:
                    connection.executemany(_INSERT, rows)
                    if time.monotonic() > dropped_s + _DROP_S:
                        dropped_s = time.monotonic()
                        self._drop(connection)
            except sqlite3.Error as error:
                self._on_lost(len(rows))
                logger.warning("the ledger %s could not be written: %s", self._config.file, error)
        connection.close()

    def _drop(self, connection: sqlite3.Connection) -> None:
        """Remove what is too old, and the oldest of what is too much."""
        connection.execute("DELETE FROM requests WHERE at_s < ?", (time.time() - self._config.days * _DAY_S,))
        newest = connection.execute("SELECT max(rowid) FROM requests").fetchone()[0] or 0
        connection.execute("DELETE FROM requests WHERE rowid <= ?", (newest - self._config.requests,))
