"""How a model that is fetched is shown: on a terminal a moving line, elsewhere the beginning and the end."""

import contextlib
from collections.abc import Iterator

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from prfaas.cli.common import progress_bar
from prfaas.core.deployment import Deployment
from prfaas.serving.engines.fetching import FetchReport, LoggedFetch
from prfaas.serving.engines.preparation import ensure_model


def fetch_model(deployment: Deployment, *, weights: bool = True, update: bool = False) -> None:
    """Put the model of a deployment on this machine, as `ensure_model` does."""
    with shown_fetch() as report:
        ensure_model(deployment, report, weights=weights, update=update)


@contextlib.contextmanager
def shown_fetch() -> Iterator[FetchReport]:
    """A report that writes to stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_bar(*columns) as progress:
        yield _Shown(progress) if progress.console.is_terminal else LoggedFetch()


class _Shown:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def notice(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False)

    def fetched(self, what: str, done_bytes: int, total_bytes: int) -> None:
        task = self._tasks.get(what)
        if task is None:
            task = self._tasks[what] = self._progress.add_task(what, total=total_bytes)
        self._progress.update(task, completed=done_bytes, total=total_bytes)
