"""The connector's part of the machine's pool inside a worker."""

import logging

from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.engines.vllm.layout import KvLayout
from prfaas.serving.engines.vllm.pool_reader import PoolReader
from prfaas.serving.engines.vllm.pool_writer import PoolWriter
from prfaas.serving.engines.vllm.rank_pages import RankPages
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient

logger = logging.getLogger(__name__)


class PoolWorker:
    """A rank's session with the daemon, what it reads from the pool, and what it writes into it."""

    def __init__(
        self,
        layout: KvLayout,
        geometry: PoolGeometry,
        rank: int,
        client: PoolClient,
        load_wait_s: float,
        stats: ConnectorStats,
    ) -> None:
        """
        Args:
            layout: of this rank's KV.
            geometry: of the pool.
            rank: the tensor-parallel rank.
            client: a session of the kind "worker", which ends with this.
            load_wait_s: a load waits that long at most for pages that come from the SSD.
            stats: where both count.
        """
        pages = RankPages(layout, geometry, rank)
        self._client = client
        self.reader = PoolReader(pages, client, load_wait_s, stats)
        self.writer = PoolWriter(pages, client, stats)

    @classmethod
    def connect(
        cls,
        settings: ConnectorSettings,
        layout: KvLayout,
        geometry: PoolGeometry,
        rank: int,
        stats: ConnectorStats,
    ) -> "PoolWorker":
        """Open the session; a daemon that is not there yet is looked for in the background."""
        assert settings.pool_socket is not None, "an engine without a pool has none to connect to"
        timeout_s = settings.pool.timeout_s
        client = PoolClient(settings.pool_socket, "worker", geometry, rank, timeout_s, settings.name)
        client.connect()
        logger.info("pages of the pool, bytes on a rank by KV group: %s", geometry.groups)
        return cls(layout, geometry, rank, client, settings.transfer.load_wait_s, stats)

    def close(self) -> None:
        """End every thread and the session."""
        self.reader.close()
        self.writer.close()
        self._client.close()
