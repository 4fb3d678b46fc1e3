"""Run by the Python of vLLM's environment: greedy float32 outputs of one verifier, with and without drafts.

    generate_with_vllm.py REQUEST.json ANSWER.json

REQUEST.json holds `runs` (each with a `name`, a `model` and a `speculative_config` or null), `prompts` (lists of token
ids), `max_tokens` and `max_model_len`. A speculator's directory as `model` goes to vLLM as it is: method, depth and
verifier are what vLLM reads from it. ANSWER.json gets, for each name, the token ids and the counters of its run
(`runs`), and the token ids of the verifier alone (`without_drafts`). It is written anew after every run, so that a
refused run loses nothing of the others.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

COUNTERS = "vllm:spec_decode_"


def generate(model: str, speculative_config: dict | None, request: dict) -> tuple[list[list[int]], dict]:
    llm = LLM(
        model=model,
        speculative_config=speculative_config,
        dtype="float32",
        enforce_eager=True,
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    read = {"method": None, "num_speculative_tokens": None, "verifier": llm.llm_engine.vllm_config.model_config.model}
    speculative = llm.llm_engine.vllm_config.speculative_config
    if speculative is not None:
        read |= {"method": speculative.method, "num_speculative_tokens": speculative.num_speculative_tokens}
        for metric in llm.get_metrics():
            if metric.name.startswith(COUNTERS):
                read[metric.name.removeprefix(COUNTERS)] = metric.values if hasattr(metric, "values") else metric.value
    llm.llm_engine.engine_core.shutdown()
    return outputs, read


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    answer: dict = {"runs": {}, "without_drafts": None}
    for run in request["runs"]:
        outputs, read = generate(run["model"], run["speculative_config"], request)
        answer["runs"][run["name"]] = {"read": read, "with_drafts": outputs}
        if answer["without_drafts"] is None:
            answer["without_drafts"], _ = generate(read["verifier"], None, request)
        Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
