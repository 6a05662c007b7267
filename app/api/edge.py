"""The outermost layer of ASGI: stamps receipt, names the request, asks for the key, logs, and catches all.

Plain ASGI: class-based middleware hides a caller's hang-up from the routes.
"""

import hmac
import logging
import re
import uuid
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import timings
from app.api.errors import error_response
from app.errors import InternalError, InvalidApiKey, ServiceError
from app.lifecycle import Lifecycle
from app.log import request_id_var
from app.request import Call

logger = logging.getLogger("batchserve.access")

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Edge:
    """Wraps the whole application.

    Args:
        app: the application.
        api_keys: bearer keys; none: no key is asked for.
        root_path: prefix that a gateway may have left on the path.
        lifecycle: told of each call's end; says whether connections should be closed after their answer.
        count_error: called with the code of an error that this layer answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        root_path: str,
        lifecycle: Lifecycle,
        count_error: Callable[[str], None],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._root_path = root_path
        self._lifecycle = lifecycle
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(timings.now())
        scope = self._with_prefix(scope)
        request_id = _request_id(dict(scope["headers"]).get(b"x-request-id", b""))
        scope.setdefault("state", {})["call"] = call
        token = request_id_var.set(request_id)
        answer = _Answer(send, request_id, self._lifecycle)
        try:
            await self._serve(scope, receive, answer)
        finally:
            self._lifecycle.call_ended(call)
            self._log(scope, answer.status, timings.elapsed(call.received))
            request_id_var.reset(token)

    def _with_prefix(self, scope: Scope) -> Scope:
        """ASGI wants the whole path, with the prefix that some gateways leave on and others take off."""
        path, prefix = scope["path"], self._root_path
        if not prefix or path == prefix or path.startswith(prefix + "/"):
            return scope
        return {**scope, "path": prefix + path}

    async def _serve(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        if not self._may_pass(scope):
            is_given = b"authorization" in dict(scope["headers"])
            problem = "the API key given is not one of this service's" if is_given else "an API key is needed"
            error = InvalidApiKey(f"{problem}; it is sent as Authorization: Bearer <key>")
            await self._refuse(error, scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        except Exception:
            logger.exception("%s %r failed", scope["method"], scope["path"])
            if answer.status is not None:
                raise
            await self._refuse(InternalError("the service failed; its log has the details"), scope, receive, answer)

    async def _refuse(self, error: ServiceError, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        self._count_error(error.code)
        await error_response(error)(scope, receive, answer)

    def _may_pass(self, scope: Scope) -> bool:
        """Whether the key is right; compares with every key, each in constant time."""
        if not self._keys or scope["path"].removeprefix(self._root_path) in OPEN_PATHS:
            return True
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    @staticmethod
    def _log(scope: Scope, status: int | None, elapsed_s: float) -> None:
        level = logging.DEBUG if scope["path"] in OPEN_PATHS or scope["path"] == "/metrics" else logging.INFO
        method, path, elapsed_ms = scope["method"], scope["path"], elapsed_s * 1000
        fields = {"method": method, "path": path, "status": status, "duration_ms": elapsed_ms}
        logger.log(level, "%s %r %s %.1f ms", method, path, status or "gone", elapsed_ms, extra={"fields": fields})


class _Answer:
    """``send`` with the headers that every answer carries."""

    def __init__(self, send: Send, request_id: str, lifecycle: Lifecycle) -> None:
        self._send = send
        self._request_id = request_id
        self._lifecycle = lifecycle
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self._request_id.encode())]
            if self._lifecycle.is_ending:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)


def _request_id(given: bytes) -> str:
    """The caller's id when it is sane, else a new one."""
    text = given.decode("latin-1")
    return text if _SANE_ID.fullmatch(text) else uuid.uuid4().hex
