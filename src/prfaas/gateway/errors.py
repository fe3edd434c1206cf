"""Errors as an OpenAI client expects them."""

from http import HTTPStatus

import orjson


class ApiError(Exception):
    """An error answer: HTTP status, one sentence, and the parameter it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`, the types as vLLM names them."""
        return error_body(self.status, self.message, self.param)


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error answer with HTTP `status`."""
    phrase = HTTPStatus(status).phrase.title()
    kind = phrase.replace(" ", "").replace("-", "").removesuffix("Error") + "Error"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})
