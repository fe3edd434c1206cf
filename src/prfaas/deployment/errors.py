"""What is wrong in a deployment file, in one sentence."""

from pathlib import Path


class DeploymentError(ValueError):
    """A deployment file can't be used. The text is `file:line: field: what is wrong; what would be right`."""

    def __init__(self, path: Path, line: int | None, field: str, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self.path = path
        self.line = line
        self.field = field
        self.problem = problem
