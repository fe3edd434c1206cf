"""In whatever shape a prompt comes to real vLLM, the gateway knows it by the very ids that the decode engine makes."""

import pytest
from tests.serving.gateway.prompts.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES

from ..asked_shapes import SHAPES, check_ids
from ..stack import Stack

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("stand-ins render in `make test`"),
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_the_engines(stack: Stack, path: str) -> None:
    assert check_ids(stack, path) == sum(at == path for at, _ in SHAPES.values())
