"""The deployment files that come with prfaas."""

from pathlib import Path


def example_path(name: str) -> Path:
    """`examples/NAME` beside an installed package, or in the repository that it was installed from.

    Raises:
        CliError: it is not there.
    """
    import prfaas
    from prfaas.cli.errors import CliError

    package = Path(prfaas.__file__).parent
    for directory in (package / "examples", package.parents[1] / "examples"):
        if (directory / name).is_file():
            return directory / name
    raise CliError(f"examples/{name} is not installed with this prfaas")
