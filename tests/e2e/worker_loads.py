"""Plain vLLM's log-probs of given tokens: ``worker_loads.py MODEL-FOLDER TOKEN-IDS``, a JSON list as the last line."""

import json
import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
from vllm import LLM, SamplingParams  # noqa: E402

if __name__ == "__main__":
    ids = json.loads(sys.argv[2])
    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
    output, = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    print(json.dumps([entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]))
    sys.stdout.flush()
    os._exit(0)  # the engine's own end says more on standard output
