"""When a gateway has asked an engine how it makes token ids: until then it has four short prompts computed there."""

from pathlib import Path


def is_introduced(gateway_log: Path) -> bool:
    """Whether the gateway that writes this log has asked all that it asks at its start.

    In a batch with its prompts a request is rounded otherwise, and the borders of its chunks move.
    """
    told = gateway_log.read_text()
    return all(f"{each}: token ids come from" in told for each in ("completions", "chat"))
