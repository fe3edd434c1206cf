"""How one gateway of a fleet tells that it has taken its file on, and looks at its file when another one tells that."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prfaas.core.deployment import Deployment
from prfaas.serving.fleet.messages import Reloaded, file_digest

logger = logging.getLogger(__name__)


class FleetReloads:
    """The reloads of one gateway among several. It belongs to one running event loop.

    Every file that is taken on here is told once, also where only a setting of the gateway has changed in it, and also
    where the store fails meanwhile. Who looks because another one has told it, and takes on the same, tells nothing.
    """

    def __init__(self, deployment: Deployment, name: str) -> None:
        """`name`: this gateway's in the fleet."""
        self.reload: Callable[[], Awaitable[object]] | None = None
        """Has this gateway take its file on again."""
        self.digest = file_digest(deployment)
        """Of the file that it runs."""
        self._name = name
        self._said = deployment
        self._has_news = False
        self._heard: Reloaded | None = None
        self._looking: asyncio.Task[None] | None = None
        self._newest_revision = 0

    def adopt(self, said: Deployment) -> None:
        """This gateway has taken a file on."""
        self._has_news = self._has_news or said != self._said
        self._said, self.digest = said, file_digest(said)

    def hear(self, told: Reloaded, *, is_old: bool) -> None:
        """Another gateway has taken a file on: look at the one here. `is_old`: before this gateway read its own."""
        if is_old or told.by == self._name or self.reload is None:
            return
        self._heard = told
        if not self._is_looking:
            self._looking = asyncio.get_running_loop().create_task(self._look(self.reload))

    def is_news(self, revision: int) -> bool:
        """Whether a word of the store is newer than those before; asked once of each."""
        before, self._newest_revision = self._newest_revision, max(self._newest_revision, revision)
        return revision > before

    def count_anew(self) -> None:
        """The store's revisions begin anew."""
        self._newest_revision = 0

    async def tell(self, put: Callable[[Reloaded], Awaitable[int | None]]) -> None:
        """Tell what is not told yet. `put` returns None, or raises StoreError, where it is not written."""
        if not self._has_news or self._is_looking:
            return
        said = self._said
        if await put(Reloaded(self._name, self.digest)) is not None:
            self._has_news = self._said is not said

    async def close(self) -> None:
        """Look no longer."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    @property
    def _is_looking(self) -> bool:
        return self._looking is not None and not self._looking.done()

    async def _look(self, reload: Callable[[], Awaitable[object]]) -> None:
        # What is told meanwhile may be of a file that was read too early.
        while (told := self._heard) is not None:
            self._heard = None
            try:
                await reload()
            except Exception as error:
                logger.warning("%s has taken another file on, and this gateway can't: %s", told.by, error)
            if self.digest == told.file:
                self._has_news = False
                logger.info("this gateway has the file that %s has taken on", told.by)
            else:
                logger.warning("the deployment file here is not the one that %s has taken on", told.by)
