"""Engines that prfaas drives."""


class EngineError(RuntimeError):
    """An engine can't be started, or ended before it was ready; the message is for the person who started it."""
