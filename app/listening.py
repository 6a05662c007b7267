"""The socket that the service listens on."""

import contextlib
import socket

from app.errors import StartError


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, before anything slow: a taken port is known at once.

    Raises:
        StartError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as on_error:
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            on_error.pop_all()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host"
        ) from error
    return listener
