"""How what an optional part of prfaas needs gets installed: said here, and in docs/guides/install.md, nowhere else."""


def how_to_install(extra: str) -> str:
    """A command for a sentence about what is missing, for example "pip install '.[plan]' in a checkout of prfaas".

    No release is published yet, so a package index does not know prfaas.

    Args:
        extra: a name of `optional-dependencies` in pyproject.toml.
    """
    return f"pip install '.[{extra}]' in a checkout of prfaas"
