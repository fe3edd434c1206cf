"""How requests are sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """`stream`: answers as events, without which there is no time of a first token.

    `vocabulary_size`: token ids of made-up prompts are below it; 256 suits every model. `ignore_eos`: answers
    have exactly as many tokens as the request says (an extension of vLLM's). `max_connections`: requests that
    can be open at once; more wait, and the result says so. `timeout_s`: a request without its whole answer by
    then is lost. `headers`: sent with every request.
    """

    stream: bool = True
    vocabulary_size: int = 256
    ignore_eos: bool = True
    max_connections: int = 4096
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
