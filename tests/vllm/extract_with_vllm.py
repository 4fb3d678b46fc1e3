"""Run by the Python of vLLM's environment: hidden states through our connector, one engine after another.

    extract_with_vllm.py REQUEST.json ANSWER.json

REQUEST.json holds a list of engines: `model`, `layers`, `transfer` (a `kv_transfer_config`), `engine` (keywords of LLM)
and `cases`, each with `case`, `prompts` (lists of token ids), `max_tokens`, `include_output_tokens`, `together` (all
prompts in one call, or each in its own) and, where its client chooses, `path`. ANSWER.json gets, for each engine, in
the order of the prompts, a list of `{case, path, error, token_ids, num_cached, stock_shape}`, where `token_ids` are
those whose states were asked for, and `stock_shape` is that of the states as vLLM's own reader finds them, or null
where it finds none. Before its cases, an engine is given a long request that is aborted.
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
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states


def start(request: dict) -> LLM:
    return LLM(
        model=request["model"],
        dtype="float32",
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": request["layers"]}},
        },
        kv_transfer_config=request["transfer"],
        **request["engine"],
    )


def run(llm: LLM, case: dict) -> list[dict]:
    asked = {"include_output_tokens": case["include_output_tokens"]}
    if "path" in case:
        asked["hidden_states_path"] = case["path"]
    extra = {"kv_transfer_params": asked}
    parameters = SamplingParams(temperature=0.0, max_tokens=case["max_tokens"], ignore_eos=True, extra_args=extra)
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    calls = [prompts] if case["together"] else [[one] for one in prompts]
    found = []
    for call in calls:
        for output in llm.generate(call, parameters, use_tqdm=False):
            told = output.kv_transfer_params or {}
            ids = list(output.prompt_token_ids)
            if case["include_output_tokens"]:
                ids = (ids + list(output.outputs[0].token_ids))[:-1]
            found.append(
                {
                    "case": case["case"],
                    "path": told.get("hidden_states_path"),
                    "error": told.get("hidden_states_error"),
                    "token_ids": ids,
                    "num_cached": output.num_cached_tokens,
                    "stock_shape": stock_shape(told.get("hidden_states_path")),
                }
            )
    return found


def stock_shape(path: str | None) -> list[int] | None:
    try:
        return None if path is None else list(load_hidden_states(path)["hidden_states"].shape)
    except FileNotFoundError:
        return None


def abort_one(llm: LLM, prompt: list[int]) -> None:
    """A request whose client goes away while it is generating."""
    engine = llm.llm_engine
    engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort_request(["aborted"])


def main(request_path: str, answer_path: str) -> None:
    answers = []
    for request in json.loads(Path(request_path).read_text(encoding="utf-8")):
        llm = start(request)
        abort_one(llm, request["cases"][0]["prompts"][0][::-1])
        answers.append([row for case in request["cases"] for row in run(llm, case)])
        llm.llm_engine.engine_core.shutdown()
        Path(answer_path).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
