"""What is wrong with a file of secrets. Every command may have to say it, so this needs the standard library only."""


class KeyFileError(ValueError):
    """The key file is missing, unreadable, open to others, or not 64 hex digits."""


class TlsFileError(ValueError):
    """A certificate, key or authority file cannot be used; the message names it."""
