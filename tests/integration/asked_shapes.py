"""Prompts in all shapes, asked of a stack: whether the gateway knows them by the ids that its decode engines make."""

from typing import Any

from tests.serving.gateway.prompts.shapes import CHAT, COMPLETIONS, RESPONSES, limited, shapes

from .stack import MODEL, TENANT_HEADER, DemoAnswer, Stack, call

SHAPES = shapes("tell me of colours " * 30, list(range(40, 240)) * 3)


def ask(stack: Stack, name: str, path: str, body: dict[str, Any], tenant: str) -> DemoAnswer:
    answer = call(stack.url(name, path), {"model": MODEL, **body}, headers={TENANT_HEADER: tenant})
    assert answer.status == 200, (tenant, answer.body)
    return answer


def ids_in(answer: DemoAnswer) -> list[int]:
    ids: list[int] = answer.body.get("prompt_token_ids") or answer.body["choices"][0]["prompt_token_ids"]
    return ids


def check_ids(stack: Stack, path: str) -> int:
    """Each shape of one API goes through the gateway as the ids that a decode engine makes of it alone.

    Returns how many were prefilled elsewhere.
    """
    moved = 0
    for name, (at, asked) in SHAPES.items():
        if at != path:
            continue
        before, body = loads(stack), limited(path, asked, 4) | {"return_token_ids": True}
        # Each tenant's prompts are new to the engines: KV moves, and is loaded where the ticket's digest fits.
        ours = ask(stack, "gateway", path, body, name)
        if ours.route["prefill"] != ours.route["decode"]:
            assert loads(stack) > before, name
            moved += 1
        theirs = ask(stack, ours.route["decode"], path, body, name)
        if path in (COMPLETIONS, CHAT):
            assert ids_in(ours) == ids_in(theirs), name
        elif path == RESPONSES:
            assert ours.body["usage"]["input_tokens"] == theirs.body["usage"]["input_tokens"], name
    stack.wait_clean()
    return moved


def loads(stack: Stack) -> float:
    return sum(
        stack.metric(each.name, "vllm:prfaas_loads_completed_total") for each in stack.deployment.instances
    )
