"""When a gateway has asked an engine how it makes token ids."""

from pathlib import Path


def is_introduced(gateway_log: Path) -> bool:
    """Whether the gateway that writes this log has asked all that it asks at its start: its own ids are used then."""
    told = gateway_log.read_text()
    return all(f"{each}: token ids come from" in told for each in ("completions", "chat"))
