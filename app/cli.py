"""``batchserve serve``, ``doctor`` and ``openapi``: the command line, the server and the process's exit code."""

import difflib
import io
import json
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from app.errors import StartError
from app.log import complain, configure

logger = logging.getLogger("batchserve")

USAGE = """batchserve: offline batch inference with vLLM over HTTP

  batchserve serve [--port 8000 ...]    start the service; serve --help lists the settings
  batchserve doctor [--quick] [...]     check what a start with these options needs, and say what to do;
                                        without --quick the engine is built and generates
  batchserve openapi                    print the OpenAPI document
"""
COMMANDS = ("serve", "doctor", "openapi")
EXIT_USAGE = 2
EXIT_PIPE = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name in it that the terminal's encoding lacks is no fault
    command, rest = (words[0], words[1:]) if words else ("help", [])
    try:
        if command == "serve":
            serve(rest)
        if command == "doctor":
            return _examine(rest)
        if command == "openapi":
            return _print_openapi()
    except StartError as error:
        complain(str(error))
        return 1
    except BrokenPipeError:  # whoever reads, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    if command in ("help", "--help", "-h"):
        print(USAGE, end="")
        return 0
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    print(f"batchserve: there is no command {command!r}{hint}\n\n{USAGE}", end="", file=sys.stderr)
    return EXIT_USAGE


def _examine(arguments: list[str]) -> int:
    from app.doctor import run

    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _print_openapi() -> int:
    from app.main import create_app
    from app.settings import Settings

    app = create_app(Settings(backend="fake"))
    print(json.dumps(app.openapi(), indent=2, ensure_ascii=False), flush=True)
    return 0


def serve(arguments: list[str]) -> NoReturn:
    """Listen, load and serve until a signal; ends the process itself, with the lifecycle's exit code.

    Raises:
        StartError: a setting is wrong, or the port is taken.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # until the server has its own: nothing has been accepted yet
        signal.signal(number, lambda *_: os._exit(0))
    from app.listening import listen
    from app.main import create_app
    from app.server import Server
    from app.settings import load_settings

    settings = load_settings(arguments)
    configure(settings.log_level, settings.log_format)
    app = create_app(settings)
    listener = listen(settings.host, settings.port)
    url = _url(settings.host, listener)
    logger.info("listening on %s; the model loads", url)
    Server(app, greeting=_greeting(url, bool(settings.api_key))).run_on(listener)
    service = app.state.service
    service.backend.kill()
    logger.info("ended with exit code %d", service.lifecycle.exit_code)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(service.lifecycle.exit_code)  # a call that still runs on the engine thread must not keep the process


def _url(host: str, listener: socket.socket) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return (
        f"http://[{shown}]:{listener.getsockname()[1]}"
        if ":" in shown
        else f"http://{shown}:{listener.getsockname()[1]}"
    )


def _greeting(url: str, key_needed: bool) -> str:
    """Two lines to copy."""
    head = "curl -s -H 'Content-Type: application/json'" + (" -H 'Authorization: Bearer KEY'" if key_needed else "")
    one = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    two = {"requests": [{"prompt": "The capital of France is"}, {"prompt": "2 + 2 ="}], "defaults": {"max_tokens": 8}}
    lines = (f"{head} {url}/{route} -d '{json.dumps(body)}'" for route, body in (("generate", one), ("batch", two)))
    return "\n".join((f"batchserve is ready at {url}", *lines))
