"""What ends a replay before it begins, in one sentence."""


class ReplayError(Exception):
    """The endpoint can't be used; what happens to single requests is in their records."""
