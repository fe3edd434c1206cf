"""Why engines can't run, in one sentence for the person who started them."""


class EngineError(RuntimeError):
    """An engine can't be started, or ended before it was ready."""
