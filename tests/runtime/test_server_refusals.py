"""What the server refuses, and how it says so."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.verifier import Verifier
from tests.runtime.serving import serving

PROMPT = "The quick brown fox jumps over"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a city."}]
EXACT = {"temperature": 0, "max_tokens": 20}
LIMITS = EngineLimits(max_num_seqs=4, max_model_len=200)


@pytest.fixture(scope="module")
def address(tiny_verifier: Path) -> Iterator[str]:
    llm = LLM.from_parts(Verifier.from_pretrained(tiny_verifier, dtype="float32"), limits=LIMITS)
    with serving(llm) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "change", "param", "code", "words"),
    [
        ("completions", {"temprature": 1}, "temprature", "unknown_parameter", "did you mean 'temperature'"),
        ("completions", {"zzz": 1}, "zzz", "unknown_parameter", "known fields are model"),
        ("completions", {"temperature": "hot"}, "temperature", "invalid_value", "valid number"),
        ("completions", {"temperature": -1}, "temperature", "invalid_value", "greater than or equal to 0"),
        ("completions", {"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        ("completions", {"n": True}, "n", "invalid_value", "valid integer"),
        ("completions", {"seed": 2**70}, "seed", "invalid_value", "less than"),
        ("completions", {"max_tokens": 0}, "max_tokens", "invalid_value", "greater than or equal to 1"),
        ("completions", {"max_tokens": 500}, "max_tokens", "context_length_exceeded", "max_model_len=200"),
        ("completions", {"logprobs": 21}, "logprobs", "invalid_value", "less than or equal to 20"),
        ("completions", {"stop": ["a", ""]}, "stop.1", "invalid_value", "at least 1 character"),
        ("completions", {"prompt": []}, "prompt", "invalid_value", "a list of token ids"),
        ("completions", {"prompt": ["a", 1]}, "prompt", "invalid_value", "a list of token ids"),
        ("completions", {"prompt": None}, "prompt", "invalid_value", "required"),
        ("completions", {"prompt": ""}, "prompt", "invalid_value", "the prompt is empty"),
        ("completions", {"prompt": [5, 4000]}, "prompt", "invalid_value", "4000 is outside 0..383"),
        ("completions", {"prompt": [5] * 300, "max_tokens": None}, "prompt", "invalid_value", "300 tokens"),
        ("completions", {"echo": True}, "echo", "unsupported_value", "cannot be honoured"),
        ("completions", {"suffix": "end"}, "suffix", "unsupported_value", "cannot be honoured"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "'x' is no token id"),
        ("completions", {"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value", "less than or equal to 100"),
        ("completions", {"logit_bias": {"384": 1}}, "logit_bias", "invalid_value", "384, which is outside 0..383"),
        ("completions", {"presence_penalty": 2.5}, "presence_penalty", "invalid_value", "less than or equal to 2"),
        ("completions", {"frequency_penalty": -3}, "frequency_penalty", "invalid_value", "greater than or equal to -2"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "greater than 0"),
        ("completions", {"min_tokens": -1}, "min_tokens", "invalid_value", "greater than or equal to 0"),
        ("completions", {"min_tokens": 21}, "min_tokens", "invalid_value", "at most max_tokens=20"),
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids", "invalid_value", "at least 1 item"),
        ("completions", {"allowed_token_ids": [9999]}, "allowed_token_ids", "invalid_value", "outside 0..383"),
        ("completions", {"bad_words": [""]}, "bad_words.0", "invalid_value", "at least 1 character"),
        ("completions", {"bad_words": [" "]}, "bad_words", "invalid_value", "none blank"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value", "less than or equal to 20"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value", "greater than or equal to 0"),
        ("completions", {"prompt_logprobs": "1"}, "prompt_logprobs", "invalid_value", "valid integer"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value", "leave out stream"),
        ("completions", {"structured_outputs": {"regx": "a"}}, "structured_outputs", "invalid_value", "'regex'"),
        ("completions", {"structured_outputs": {"regex": "(("}}, "structured_outputs", "invalid_value", "unclosed"),
        ("completions", {"guided_regex": "a"}, "guided_regex", "unknown_parameter", "structured_outputs={'regex'"),
        ("completions", {"guided_decoding_backend": "x"}, "guided_decoding_backend", "unknown_parameter", "llguidance"),
        (
            "completions", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs", "invalid_value", "exclude each other",
        ),
        (
            "completions", {"allowed_token_ids": [1], "min_tokens": 2}, None, "no_token_allowed",
            "allowed_token_ids, min_tokens together leave no token",
        ),
        ("completions", {"stream_options": {}}, "stream_options", "invalid_value", "stream=true"),
        (
            "completions", {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages", "unknown_parameter", "did you mean 'include_usage'",
        ),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "unsupported_value", "cannot be honoured"),
        (
            "chat/completions", {"response_format": {"type": "json"}}, "response_format.type", "invalid_value",
            "'text', 'json_object' or 'json_schema'",
        ),
        (
            "chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
            "invalid_value", "belong together",
        ),
        (
            "chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema", "invalid_value", "under 'schema'",
        ),
        (
            "chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schem": {}}}},
            "response_format.json_schema", "unknown_parameter", "known fields are name",
        ),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs=true"),
        ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value", "differ"),
        ("chat/completions", {"messages": []}, "messages", "invalid_value", "at least 1 item"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role", "invalid_value", "required"),
        (
            "chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content", "unsupported_value", "image_url",
        ),
        (
            "chat/completions", {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages.0.tool_calls", "unsupported_value", "cannot be honoured",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    address: str, path: str, change: dict[str, object], param: str | None, code: str, words: str
) -> None:
    body = {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    response = httpx.post(f"{address}/v1/{path}", json={**body, **EXACT, **change})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert words in error["message"]


def test_values_that_ask_for_nothing_pass(address: str) -> None:
    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"},
        "repetition_penalty": 1, "min_tokens": 0, "bad_words": [], "allowed_token_ids": None, "prompt_logprobs": None,
        "tools": [], "tool_choice": "none", "user": "someone", "temperature": None, "stop": None, "functions": None,
        "store": False,
    }  # fmt: skip
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "Rome", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    response = httpx.post(f"{address}/v1/chat/completions", json={"messages": history, "max_tokens": 2, **neutral})
    assert response.status_code == 200


def test_broken_bodies_and_unknown_places(address: str) -> None:
    broken = httpx.post(
        f"{address}/v1/completions", content='{"prompt": ', headers={"content-type": "application/json"}
    )
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        response = httpx.get(f"{address}{path}")
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_chat_templates_that_refuse_and_that_are_broken(tiny_verifier: Path) -> None:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    assert verifier.tokenizer is not None
    with serving(LLM.from_parts(verifier, limits=LIMITS)) as address:
        for template, status, words in (
            ("{{ raise_exception('roles must alternate') }}", 400, "refuses this conversation: roles must alternate"),
            ("{{ 1 // 0 }}", 500, "internal error: ZeroDivisionError"),
            (None, 400, "has no chat template"),
        ):
            verifier.tokenizer.chat_template = template
            response = httpx.post(f"{address}/v1/chat/completions", json={"messages": MESSAGES})
            assert response.status_code == status
            assert words in response.json()["error"]["message"]
