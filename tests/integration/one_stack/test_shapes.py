"""In whatever shape a prompt comes to real vLLM, the gateway knows it by the very ids that the decode engine makes."""

from typing import Any

import pytest
from tests.serving.gateway.prompts.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, limited, shapes

from ..stack import MODEL, TENANT_HEADER, Stack, call

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("stand-ins render in `make test`"),
    pytest.mark.timeout(1800),
]

SHAPES = shapes("tell me of colours " * 30, list(range(40, 240)) * 3)
LOADS = "vllm:prfaas_loads_completed_total"


def ask(stack: Stack, name: str, path: str, body: dict[str, Any], tenant: str) -> Any:
    answer = call(stack.url(name, path), {"model": MODEL, **body}, headers={TENANT_HEADER: tenant})
    assert answer.status == 200, (tenant, answer.body)
    return answer.body


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_the_engines(stack: Stack, path: str) -> None:
    for name, (at, asked) in SHAPES.items():
        if at != path:
            continue
        before, body = stack.metric("home-decode-0", LOADS), limited(path, asked, 4)
        # Each tenant's prompts are new to the engines: KV moves, and is loaded where the ticket's digest fits.
        ours = ask(stack, "gateway", path, body | {"return_token_ids": True}, name)
        assert stack.metric("home-decode-0", LOADS) > before, name
        theirs = ask(stack, "home-decode-0", path, body | {"return_token_ids": True}, name)
        if path in (COMPLETIONS, CHAT):
            told = [a.get("prompt_token_ids") or a["choices"][0]["prompt_token_ids"] for a in (ours, theirs)]
            assert told[0] == told[1], name
        elif path == RESPONSES:
            assert ours["usage"]["input_tokens"] == theirs["usage"]["input_tokens"], name
    stack.wait_clean()
