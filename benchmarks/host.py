"""The service with one route more: ``POST /direct`` gives windows to its own ``LLM.generate()``.

So both sides of a comparison have the same engine in the same process. Two processes would not do: with the same
arguments they differ for as long as they live, by the memory that each happened to get.
"""

import logging
import os
import sys
import time
from typing import Any

from fastapi import FastAPI

from app.listening import listen
from app.log import configure
from app.main import create_app
from app.models.embedded import end_with_parent
from app.server import Server
from app.settings import load_settings

Window = list[dict[str, Any]]


def add_direct(app: FastAPI) -> None:
    """``POST /direct``: a list of windows in, seconds for all of them and the tokens that they gave out."""
    backend = app.state.service.backend

    async def direct(windows: list[Window]) -> dict[str, Any]:
        answer: dict[str, Any] = await backend._thread.call(_run, backend._llm, windows)
        return answer

    app.add_api_route("/direct", direct, methods=["POST"])


def _run(llm: Any, windows: list[Window]) -> dict[str, Any]:
    """One ``generate()`` after the other on the engine thread, timed as its caller sees it."""
    from vllm import SamplingParams

    prepared = []
    for window in windows:
        settings = [{name: value for name, value in body.items() if name != "prompt"} for body in window]
        prepared.append(([body["prompt"] for body in window], [SamplingParams(**values) for values in settings]))
    tokens = 0
    begun = time.perf_counter()
    for prompts, params in prepared:
        for output in llm.generate(prompts, params, use_tqdm=False):
            tokens += len(output.outputs[0].token_ids)
    return {"seconds": time.perf_counter() - begun, "completion_tokens": tokens}


def main() -> None:
    """Serve, as ``batchserve serve`` does, for as long as the parent lives."""
    end_with_parent()
    settings = load_settings(sys.argv[1:])
    configure(settings.log_level, settings.log_format)
    app = create_app(settings)
    add_direct(app)
    Server(app, greeting="").run_on(listen(settings.host, settings.port))
    logging.shutdown()
    os._exit(app.state.service.lifecycle.exit_code)


if __name__ == "__main__":
    main()
