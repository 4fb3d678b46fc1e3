"""Constraints and forms over HTTP: every field reaches the engine, so that answers equal those in process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import NO_TOKEN_ALLOWED
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator
from tests.runtime.serving import serving

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Name a city."}]
LIMITS = EngineLimits(max_num_seqs=4, max_model_len=200)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def local(tiny_verifier: Path) -> LLM:
    """What the server's answers must equal."""
    return LLM.from_parts(Verifier.from_pretrained(tiny_verifier, dtype="float32"), limits=LIMITS)


@pytest.fixture(scope="module")
def client(tiny_verifier: Path) -> Iterator[OpenAI]:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    llm = LLM.from_parts(verifier, random_speculator(verifier, draft_vocab_size=100), limits=LIMITS)
    with serving(llm, "tiny") as address, OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


def free_tokens(local: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=12)
    return local.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "wishes",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.25},
        {"repetition_penalty": 1.7},
        {"min_tokens": 8, "logit_bias": {1: 50}},
        {"allowed_token_ids": [70, 80, 90, 100]},
        {"bad_words": ["."]},
        {"structured_outputs": {"regex": "(fox|owl)[a-z]{3}"}},
        {"structured_outputs": {"choice": ["seven owls", "one dog"]}},
    ],
    ids=lambda wishes: next(iter(wishes)),
)
def test_fields_reach_the_engine(client: OpenAI, local: LLM, wishes: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, **wishes)
    expected = local.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert expected.token_ids != free_tokens(local)
    named = {name: value for name, value in wishes.items() if name in ("presence_penalty", "frequency_penalty")}
    if "logit_bias" in wishes:
        named["logit_bias"] = {str(token): bias for token, bias in wishes["logit_bias"].items()}
    more = {name: value for name, value in wishes.items() if name not in named}
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": more, **named}
    got = client.completions.create(prompt=PROMPT, **asked).choices[0]
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    answer = local.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    reply = client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
    assert (reply.message.content, reply.finish_reason) == (answer.text, answer.finish_reason)


def test_response_formats(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 150}
    closing_brace, end = "94", "1"
    asked["logit_bias"] = {closing_brace: 4, end: 8}
    schema = {"name": "a_number", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    text = client.chat.completions.create(response_format=form, **asked).choices[0].message.content
    value = json.loads(text or "")
    assert list(value) == ["a"]
    assert value["a"] in range(100)
    pieces = client.chat.completions.create(response_format=form, stream=True, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    any_object = client.chat.completions.create(response_format={"type": "json_object"}, **asked)
    assert isinstance(json.loads(any_object.choices[0].message.content or ""), dict)


def test_a_stream_without_a_token_left_tells_why(client: OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, max_tokens=9,
        extra_body={"structured_outputs": {"choice": ["a fox"]}, "min_tokens": 9},
    )  # fmt: skip
    with pytest.raises(APIError, match="structured_outputs, min_tokens together leave no token") as caught:
        list(stream)
    assert caught.value.code == NO_TOKEN_ALLOWED


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_are_those_of_the_prompt(client: OpenAI, local: LLM, count: int) -> None:
    """Under vLLM's names: in each choice of a completion, once in an answer of chat."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=count)
    texts = [PROMPT, "Name a city."]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 2, "n": 1}

    def told(path: str, **body: Any) -> dict[str, Any]:
        response = httpx.post(f"{client.base_url}{path}", json={**asked, **body})
        assert response.status_code == 200
        return dict(response.json())

    expected = [output.prompt_logprobs for output in local.generate(texts, params, use_tqdm=False)]
    got = [choice["prompt_logprobs"] for choice in told("completions", prompt=texts, prompt_logprobs=count)["choices"]]
    expected += [local.chat(MESSAGES, params, use_tqdm=False)[0].prompt_logprobs]
    got += [told("chat/completions", messages=MESSAGES, prompt_logprobs=count)["prompt_logprobs"]]
    for entries, known in zip(got, expected, strict=True):
        assert known is not None
        assert entries[0] is known[0] is None
        for entry, one in zip(entries[1:], known[1:], strict=True):
            assert one is not None
            assert list(entry) == [str(token) for token in one]
            for token, value in one.items():
                assert entry[str(token)]["logprob"] == pytest.approx(value.logprob, abs=1e-4)
                assert (entry[str(token)]["rank"], entry[str(token)]["decoded_token"]) == (
                    value.rank,
                    value.decoded_token,
                )
    assert "prompt_logprobs" not in told("completions", prompt=PROMPT)["choices"][0]
    assert "prompt_logprobs" not in told("chat/completions", messages=MESSAGES)
