"""The process that calls ``LLM.generate()`` directly.

Reads a JSON line for each run from standard input and answers with one: first the arguments of ``LLM``, then lists of
windows, each a list of ``/generate`` bodies.
"""

import json
import os
import sys
import time
from typing import IO, Any


def main() -> None:
    """Build the engine, then run what comes until the input ends."""
    answers = _take_stdout()
    from vllm import LLM

    llm = LLM(**json.loads(sys.stdin.readline()))
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        _answer(answers, _run(llm, json.loads(line)))
    llm.llm_engine.engine_core.shutdown()


def _run(llm: Any, windows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds for all windows, one ``generate()`` after the other, and the tokens that they gave."""
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


def _take_stdout() -> IO[str]:
    """Standard output for the answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(stream: IO[str], value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
