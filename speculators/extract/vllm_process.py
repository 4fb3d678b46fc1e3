"""Run by the Python of vLLM's environment: an engine that extracts, asked and answering in lines of JSON.

    python -m speculators.extract.vllm_process ANSWERS

Standard input says first the keywords of vLLM's `LLM`, then, a line at a time, `{"rows": [[token ids], ...]}`. Each
line is answered on the descriptor ANSWERS: `{"ready": true}`, then `{"files": [{"path": ..., "error": ...}, ...]}`. The
end of the input ends the engine. This module imports nothing that vLLM's environment lacks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve(answers: int) -> None:
    """Answer until the input ends."""
    from vllm import LLM, SamplingParams

    with os.fdopen(answers, "w", encoding="utf-8", buffering=1) as out:
        engine = LLM(**json.loads(sys.stdin.readline()))
        out.write(json.dumps({"ready": True}) + "\n")
        one_token = SamplingParams(temperature=0.0, max_tokens=1)
        for line in sys.stdin:
            prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)["rows"]]
            outputs = engine.generate(prompts, one_token, use_tqdm=False)
            files = [_file(output.kv_transfer_params or {}) for output in outputs]
            out.write(json.dumps({"files": files}) + "\n")
        engine.llm_engine.engine_core.shutdown()


def _file(told: dict[str, Any]) -> dict[str, Any]:
    return {"path": told.get("hidden_states_path"), "error": told.get("hidden_states_error")}


if __name__ == "__main__":
    serve(int(sys.argv[1]))
