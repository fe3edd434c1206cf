"""Names of the pool's pages: chained hashes of token ids, which stand for a whole prefix."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
TENANT_BYTES = 8
_PERSON = b"prfaas pool 1"


def page_id(key: bytes, group: int) -> bytes:
    """The name of one KV group's page at the end of the prefix that `key` stands for: 17 bytes."""
    return key + bytes((group,))


def tenant_id(salt: str) -> bytes:
    """Whose pages they are, for quotas: 8 bytes that follow from the tenant's salt."""
    return blake2b(salt.encode(), digest_size=TENANT_BYTES, person=_PERSON).digest()


class KeyChain:
    """One key for every whole step of a request's tokens.

    A key is BLAKE2b-128 of the key before it and of the step's token ids (uint32, little-endian). The first one
    follows a root that is the hash of salt and adapter, so that tenants and adapters share nothing. Equal keys mean
    equal prefixes: a page that is found by its key is used without another look at the tokens. That needs a hash
    that nobody can make collide, unlike the one which only routes.
    """

    __slots__ = ("_packed", "_root", "_tokens", "step_tokens")

    def __init__(self, step_tokens: int, salt: str = "", adapter: str = "") -> None:
        """Start an empty chain.

        Args:
            step_tokens: tokens of one step, above 0.
            salt: the tenant's, empty without.
            adapter: name of the LoRA adapter, empty without.
        """
        if step_tokens < 1:
            raise ValueError(f"step_tokens is {step_tokens}: it must be at least 1")
        self.step_tokens = step_tokens
        root = f"{len(salt.encode())}:{salt}{adapter}".encode()
        self._root = blake2b(root, digest_size=KEY_BYTES, person=_PERSON).digest()
        self._packed = bytearray()
        self._tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the keys cover."""
        return self._tokens

    @property
    def keys(self) -> list[bytes]:
        """All keys, in order."""
        packed = bytes(self._packed)
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the whole steps that have no key yet. Costs nothing for those that have one.

        Args:
            token_ids: the request's tokens from the first on, those with keys included.

        Raises:
            OverflowError, TypeError: an id is not an unsigned 32-bit integer.
        """
        step, start = self.step_tokens, self._tokens
        end = len(token_ids) // step * step
        if end <= start:
            return
        ids = memoryview(array("I", token_ids[start:end])).cast("B")
        key = bytes(self._packed[-KEY_BYTES:]) or self._root
        size = step * 4
        for at in range(0, len(ids), size):
            hashed = blake2b(key, digest_size=KEY_BYTES, person=_PERSON)
            hashed.update(ids[at : at + size])
            key = hashed.digest()
            self._packed += key
        self._tokens = end

    def key_at(self, end_tokens: int) -> bytes:
        """The key of the first `end_tokens` tokens, a whole number of steps above 0.

        Raises:
            ValueError: there is no key for it.
        """
        steps, rest = divmod(end_tokens, self.step_tokens)
        if rest or not 0 < end_tokens <= self._tokens:
            raise ValueError(
                f"no key at token {end_tokens}: keys are at every {self.step_tokens} up to {self._tokens}"
            )
        return bytes(self._packed[(steps - 1) * KEY_BYTES : steps * KEY_BYTES])

    def packed(self, start_step: int, end_step: int) -> bytes:
        """The keys of steps [start_step, end_step), one after the other."""
        return bytes(self._packed[start_step * KEY_BYTES : end_step * KEY_BYTES])
