"""GuideLLM as a user runs it, and what its report holds for each request."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

RUN_S = 180.0
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 12

Json = dict[str, Any]


def run_guidellm(
    program: Path, url: str, tokenizer: Path, report: Path, *, profile: str, path: str, stream: bool, count: int
) -> list[Json]:
    """Run one benchmark; the requests of its report, all of which have succeeded.

    Args:
        program: GuideLLM's command.
        url: where the service listens. GuideLLM asks it for the model's name.
        tokenizer: a folder with the model's tokenizer, with which GuideLLM writes prompts.
        report: the file to write.
        profile: how requests are sent, such as ``kind=concurrent,streams=4``.
        path: the route, which GuideLLM calls the request format.
        stream: whether answers are streamed.
        count: how many requests.
    """
    command = [
        *(str(program), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},request_format={path},stream={str(stream).lower()}"),
        *("--profile", profile),
        *("--constraint", f"kind=max_requests,count={count}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
    ]
    # One process that sends is enough, and starts sooner than GuideLLM's ten.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(
        command, cwd=report.parent, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return _successful(json.loads(report.read_text()))


def _successful(report: Json) -> list[Json]:
    (benchmark,) = report["benchmarks"]
    requests = benchmark["requests"]
    assert requests["errored"] == []
    assert not requests["incomplete"]
    return list(requests["successful"])
