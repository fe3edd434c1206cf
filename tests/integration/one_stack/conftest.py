import json
from collections.abc import Iterator

import pytest

from ..stack import Stack, running, write_deployment


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three engines of the tiny Qwen3-Next and the gateway, over a link on which transfer time matters."""
    directory = tmp_path_factory.mktemp("prfaas-test-stack")
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    # Where a grammar allows any whitespace, a model that likes it best writes nothing else to its last token.
    tools += [
        "--structured-outputs-config",
        json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    ]
    yield from running(
        write_deployment(directory, bandwidth="100 Mbit/s", extra_args=tools, staging="32 MiB")
    )
