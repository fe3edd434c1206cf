"""Which tenant a request belongs to, as the salt that keeps prefix caches apart."""

import hashlib
import hmac
from typing import Protocol

from prfaas.gateway.errors import ApiError

_PURPOSE = b"prfaas tenant\x00"
_SALT_BYTES = 16


class Headers(Protocol):
    """The headers of a request; names are compared without case."""

    def getall(self, key: str, default: list[str]) -> list[str]: ...


class Tenants:
    """Derives salts with the deployment's key, so that no client can guess or choose another's."""

    def __init__(self, key: bytes, header: str | None) -> None:
        """`header`: what names a tenant; None: everybody is the same one and shares prefixes."""
        self._key = key
        self._header = header

    def salt(self, headers: Headers) -> str:
        """32 hex digits, or "" when tenants are not told apart. A request without the header is the tenant "".

        Raises ApiError 400 for a header given twice: which of the two counts must not depend on who reads it.
        """
        if self._header is None:
            return ""
        values = headers.getall(self._header, [])
        if len(values) > 1:
            raise ApiError(400, f"The header {self._header} must not be given more than once.")
        value = values[0].encode("utf-8", "surrogateescape") if values else b""
        return hmac.digest(self._key, _PURPOSE + value, hashlib.sha256)[:_SALT_BYTES].hex()
