"""Prompts in all shapes, of models of other families than the rest is tried with: known by the engine's own ids.

Chats of gpt-oss are left out: vLLM makes their ids with a vocabulary that has to be fetched.
"""

import json
from collections.abc import Iterator

import pytest
from tests.serving.gateway.prompts.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES

from .asked_shapes import SHAPES, check_ids
from .stack import Stack, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("two families are in the other tests of shapes"),
    pytest.mark.timeout(1800),
]


def serving(directory: pytest.TempPathFactory, model: str) -> Iterator[Stack]:
    path = write_deployment(
        directory.mktemp(f"prfaas-shapes-{model}"),
        bandwidth="100 Mbit/s",
        extra_args=["--enable-auto-tool-choice", "--tool-call-parser", "pythonic"],
        max_model_len=8192,
    )
    document = json.loads(path.read_text())
    document["model"]["tiny"] = model
    # A prefill elsewhere and a decode: shapes, not ways, are what is tried.
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from serving(tmp_path_factory, "mimo-v2-flash")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from serving(tmp_path_factory, "gpt-oss")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_those_of_mimo(mimo: Stack, path: str) -> None:
    assert check_ids(mimo, path) == sum(at == path for at, _ in SHAPES.values())


def test_ids_are_those_of_gpt_oss(gpt_oss: Stack) -> None:
    assert check_ids(gpt_oss, COMPLETIONS) == sum(at == COMPLETIONS for at, _ in SHAPES.values())
