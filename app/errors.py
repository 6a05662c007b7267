"""Every failure a caller can see, with its status and code: the one place where statuses are decided.

ServiceError
├── InvalidRequest             400  invalid_request
│   └── ContextLengthExceeded  400  context_length_exceeded   + prompt_tokens, limit
├── InvalidApiKey              401  invalid_api_key
├── NotFound                   404  not_found
│   └── ModelNotFound          404  model_not_found
├── MethodNotAllowed           405  method_not_allowed        + header Allow
├── RequestTooLarge            413  request_too_large         + limit
├── QueueFull                  429  queue_full                + queue_depth, limit, header Retry-After
├── GenerationFailed           500  generation_failed
├── InternalError              500  internal_error
├── Unavailable                503  (never raised itself)     + header Retry-After
│   ├── NotReady               503  not_ready
│   ├── ShuttingDown           503  shutting_down
│   └── EngineDead             503  engine_dead
├── QueueTimeout               504  queue_timeout
└── RequestTimeout             504  request_timeout

StartError stands beside the tree: the service cannot start, and its message says what to change.
"""

from typing import Any, ClassVar

MAX_MESSAGE_CHARS = 500
"""A character takes at most six bytes of JSON, so a body with a full message stays under 4 KiB."""
MAX_PARAM_CHARS = 100


class ServiceError(Exception):
    """A failure that becomes an error body; subclasses fix status, code and type.

    Args:
        message: what is wrong and what would be right, for a person.
        param: dotted path of the field at fault, such as ``messages.0.content``.
        extra: further members of the error object, such as ``limit``.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """The inner error object: strict JSON and under 4 KiB whatever the message quotes."""
        return {
            "message": _fit(self.message, MAX_MESSAGE_CHARS),
            "type": self.type,
            "code": self.code,
            "param": None if self.param is None else _fit(self.param, MAX_PARAM_CHARS),
            **self.extra,
        }

    def headers(self) -> dict[str, str]:
        """The headers that go with this error."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class InvalidRequest(ServiceError):
    """The request cannot be served as it is written."""

    status, code, type = 400, "invalid_request", "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for one token; carries ``prompt_tokens`` and ``limit``, in tokens."""

    code = "context_length_exceeded"


class InvalidApiKey(ServiceError):
    """No bearer key, or a wrong one, while the service asks for one."""

    status, code, type = 401, "invalid_api_key", "authentication_error"

    def headers(self) -> dict[str, str]:
        """The challenge that HTTP asks for."""
        return {"www-authenticate": "Bearer"}


class NotFound(ServiceError):
    """No such route."""

    status, code, type = 404, "not_found", "not_found_error"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class MethodNotAllowed(ServiceError):
    """The route is there, the method is not; ``allow`` lists those that are."""

    status, code, type = 405, "method_not_allowed", "invalid_request_error"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        """The methods that are allowed."""
        return {"allow": self.allow}


class RequestTooLarge(ServiceError):
    """More bytes, requests or tokens than this service takes even when idle; carries ``limit``."""

    status, code, type = 413, "request_too_large", "invalid_request_error"


class QueueFull(ServiceError):
    """No place now; carries ``queue_depth`` and ``limit`` in the unit that the message names."""

    status, code, type = 429, "queue_full", "rate_limit_error"
    retry_after_s = 1


class GenerationFailed(ServiceError):
    """This request failed in the engine, or ended with a finish reason that is not documented."""

    status, code = 500, "generation_failed"


class InternalError(ServiceError):
    """A fault of the service itself; the log has the details under the request's id."""

    status, code = 500, "internal_error"


class Unavailable(ServiceError):
    """The service cannot take work now."""

    status = 503
    retry_after_s = 5


class NotReady(Unavailable):
    """The model is still loading."""

    code = "not_ready"


class ShuttingDown(Unavailable):
    """The service drains: accepted work ends, new work is refused."""

    code = "shutting_down"


class EngineDead(Unavailable):
    """The engine has died; the process ends shortly, so that a supervisor starts it again."""

    code = "engine_dead"


class QueueTimeout(ServiceError):
    """Waited longer than ``queue_timeout_s`` for a window."""

    status, code = 504, "queue_timeout"


class RequestTimeout(ServiceError):
    """Not done within ``request_timeout_s``."""

    status, code = 504, "request_timeout"


class StartError(Exception):
    """The service cannot start; the message is one line that says what to change."""


def _fit(text: str, max_chars: int) -> str:
    """Cut to ``max_chars`` and replace what UTF-8 cannot carry (lone surrogates)."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"
