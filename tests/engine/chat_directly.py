"""What vLLM's own ``LLM.chat`` makes of conversations; run as a script in a process of its own.

usage: chat_directly.py MODEL < CONVERSATIONS > ANSWERS, both JSON
"""

import json
import os
import sys
from typing import Any


def main(model: str) -> None:
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"})
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16}
    llm = LLM(model=model, kv_cache_memory_bytes=2**27, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.chat(json.load(sys.stdin), params, use_tqdm=False)
    answers = [{"text": output.outputs[0].text, "prompt_tokens": len(output.prompt_token_ids)} for output in outputs]
    json.dump(answers, out)
    out.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
