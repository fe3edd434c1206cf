"""One request as a client made it, understood."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.cache import PromptChains
from prfaas.gateway.bodies import Json
from prfaas.gateway.prompts import Endpoint, Prompt
from prfaas.gateway.records import Record


@dataclass(frozen=True, slots=True)
class Order:
    """`body`: the client's, less what could steer an engine; `size_bytes`: as long as it came.

    `model`: the name that engines know, an adapter's or the base model's; `adapter`: "" for the base model.
    `samples`: how many answers are wanted. `salt`: the tenant's. `headers`: all that engines see of the client's.
    """

    endpoint: Endpoint
    body: Json
    size_bytes: int
    prompt: Prompt
    samples: int
    model: str
    adapter: str
    salt: str
    headers: Mapping[str, str]
    record: Record


@dataclass(frozen=True, slots=True)
class Look:
    """A prompt in tokens. `exact`: these are the ids that the engine makes itself.

    `takes_ids`: the decode engine may be given them in place of what the client sent.
    """

    token_ids: Sequence[int]
    chains: PromptChains
    exact: bool
    takes_ids: bool
