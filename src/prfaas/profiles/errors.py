"""What is wrong with a latency profile, in one sentence."""


class ProfileError(ValueError):
    """A profile can't be found, read or used."""


class ProfileRangeError(ProfileError):
    """A profile was asked about something outside of what was measured."""
