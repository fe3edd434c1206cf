"""The endpoint: its address, and the model that it serves."""

from dataclasses import dataclass

import aiohttp

from prfaas.replay.errors import ReplayError

_ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """`url` without a trailing slash and without /v1. `max_model_len`: None if the endpoint doesn't tell."""

    url: str
    model: str
    max_model_len: int | None = None


async def find_target(session: aiohttp.ClientSession, url: str, model: str | None = None) -> Target:
    """Ask an OpenAI-compatible server for `model`, or the first one it names.

    Raises:
        ReplayError: it doesn't answer, or has no such model.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ReplayError(f"{url!r} is no address of a server; write for example http://127.0.0.1:8000")
    try:
        async with session.get(
            f"{base}/v1/models", timeout=aiohttp.ClientTimeout(_ASK_TIMEOUT_S)
        ) as response:
            if response.status != 200:
                raise ReplayError(
                    f"{base}/v1/models answers {response.status}; is it an OpenAI-compatible server?"
                )
            cards = (await response.json(content_type=None))["data"]
            lengths = {str(card["id"]): card.get("max_model_len") for card in cards}
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ReplayError(
            f"{base} doesn't answer ({error or type(error).__name__}); is the server up?"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReplayError(f"{base}/v1/models doesn't answer with a list of models") from error
    if not lengths or (model is not None and model not in lengths):
        raise ReplayError(
            f"{base} doesn't serve {model or 'any model'}; it has {', '.join(lengths) or 'none'}"
        )
    name = model or next(iter(lengths))
    length = lengths[name]
    return Target(base, name, length if isinstance(length, int) else None)
