"""What the user sees while engines start."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from prfaas.serving.engines.running import EngineProgress, RunningEngines


class _Lines:
    """One line per engine: a spinner that becomes a mark on terminals, plain text once it is ready elsewhere."""

    def __init__(self, console: Console, progress: Progress, names: tuple[str, ...]) -> None:
        self._console = console
        self._progress = progress
        self._tasks: dict[str, TaskID] = {
            name: progress.add_task(name, total=1, state="starting") for name in names
        }

    def show(self, step: EngineProgress) -> None:
        if step.state != "ready":
            return
        self._progress.update(self._tasks[step.name], completed=1, state="ready")
        if not self._console.is_terminal:
            self._console.print(f"{step.name}: ready after {step.elapsed_s:.0f} s")


@contextmanager
def shown_progress(engines: RunningEngines) -> Iterator[_Lines]:
    """Progress on stderr; pass `.show` to `RunningEngines.wait_ready`."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Lines(console, progress, tuple(engines.names))
