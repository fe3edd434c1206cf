"""Two clusters that serve trained weights, and prompts whose answers depend on their first lines.

Random weights find nearly all tokens as likely, whatever a prompt begins with. Trained ones repeat a name that they
read thousands of tokens before: what they answer tells whether the first blocks are right.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prfaas.tools.demo.compare import Equality, compare

from .stack import DemoAnswer, Stack, write_deployment

SMOLLM2, GEMMA3 = "smollm2", "gemma3"

FAR = "east-prefill-0"
HOMES = ("home-prefill-0", "home-decode-0")
"""Both prefill and decode, and share a pool."""

PROMPT_TOKENS = 2400
ANSWER_TOKENS = 32

EQUAL_SHARE = 0.95
"""Of an answer's tokens, those that a plain engine finds likeliest after the same past."""

# On these the KVCache of a prompt takes seconds: 23 and 3 KB a token.
BANDWIDTHS = {SMOLLM2: "100 Mbit/s", GEMMA3: "15 Mbit/s"}

# Prose that no change of the documentation touches, of the length that is wanted.
_TEXT = Path(__file__).parents[2] / "LICENSE"
_QUESTION = "\n\nThis agreement was written by"


@dataclass(frozen=True)
class Author:
    """Who wrote a text by its first line. Both models name author and town when they are asked at its end."""

    name: str
    town: str

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        """`PROMPT_TOKENS` ids: the line, a text that says nothing of it, and the question."""
        line = f"This agreement was written by {self.name}, a lawyer from {self.town}.\n\n"
        opening: list[int] = tokenizer.encode(line).ids
        text: list[int] = tokenizer.encode(_TEXT.read_text(), add_special_tokens=False).ids
        question: list[int] = tokenizer.encode(_QUESTION, add_special_tokens=False).ids
        room = PROMPT_TOKENS - len(opening) - len(question)
        return opening + (text * (1 + room // len(text)))[:room] + question

    def is_told(self, answer: str) -> bool:
        return answer.startswith(f" {self.name}, a lawyer from {self.town}")


AUTHORS = (Author("Amelia Brown", "Paris"), Author("Walter Green", "Tokyo"), Author("Rosa Miller", "Madrid"))


class TrainedStack(Stack):
    """Engines whose model answers in words."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.deployment.model.path / "tokenizer.json"))

    def check_forced(
        self, prompt: Sequence[int], token_ids: Sequence[int], *, engine: str = HOMES[0]
    ) -> DemoAnswer:
        """A plain engine that is made to answer the same, token by token, would have answered so by itself.

        It computes the last prompt token alone, as is done after a transfer. Where another token is likeliest, the two
        must lie within bf16 rounding.

        Returns:
            Its answer, to compare logits with.
        """
        plain = self.reference(prompt, len(token_ids), "plain", engine, token_ids)
        assert plain.status == 200, plain.body
        assert plain.token_ids == [prompt[-1], *token_ids]
        unlike = {}
        for place, (token, logits) in enumerate(zip(token_ids, plain.top_logits[1:], strict=True)):
            best = max(logits, key=logits.__getitem__)
            if best != token:
                unlike[place, token, best] = compare([token], [best], [logits])
        assert all(each.equality is Equality.TIE for each in unlike.values()), unlike
        assert len(unlike) <= (1 - EQUAL_SHARE) * len(token_ids), unlike
        return plain


def write_trained(directory: Path, name: str) -> Path:
    """One engine that prefills elsewhere, and two at home with a pool."""
    path = write_deployment(
        directory, bandwidth=BANDWIDTHS[name], max_model_len=4096, staging="256 MiB", pools=True
    )
    document: dict[str, Any] = json.loads(path.read_text())
    del document["model"]["tiny"]
    document["model"]["trained"] = name
    east, home = document["clusters"]
    del east["pool"]
    # So there are checkpoints from which a decode engine can go on.
    east |= {"preemptible": True, "kills_per_hour": 3600}
    for instance in home["instances"]:
        instance["roles"] = ["prefill", "decode"]
    home["pool"] |= {"memory": "512 MiB"}
    # Without tenants there are no salts: what went through the gateway can be asked for at an engine.
    del document["security"]
    path.write_text(json.dumps(document))
    return path
