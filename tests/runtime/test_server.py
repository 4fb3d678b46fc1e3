"""The server as clients meet it: the official OpenAI client and plain HTTP against a real server on this machine."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator
from tests.runtime.replaying import greedy
from tests.runtime.serving import serving

PROMPTS = ["The quick brown fox jumps over", "Name three cities near a river", "What is the sum of twelve and thirty?"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a city."}]
EXACT = {"temperature": 0, "max_tokens": 20}
LIMITS = EngineLimits(max_num_seqs=4, max_model_len=200)
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_verifier: Path) -> LLM:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    return LLM.from_parts(verifier, random_speculator(verifier, draft_vocab_size=100), limits=LIMITS)


@pytest.fixture(scope="module")
def local(tiny_verifier: Path) -> LLM:
    """What the server's answers must equal."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    return LLM.from_parts(verifier, random_speculator(verifier, draft_vocab_size=100), limits=LIMITS)


@pytest.fixture(scope="module")
def address(served: LLM) -> Iterator[str]:
    with serving(served, "tiny", "small") as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}, {"temperature": 1.2, "top_p": 0.8, "seed": 4}]
)
def test_completions_equal_generate(client: OpenAI, local: LLM, sampling: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=15, n=2, top_k=50, min_p=0.01, **sampling)
    expected = local.generate(PROMPTS, params, use_tqdm=False)
    got = client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=15, n=2, extra_body={"top_k": 50, "min_p": 0.01}, **sampling
    )
    flat = [completion for output in expected for completion in output.outputs]
    assert [choice.index for choice in got.choices] == list(range(6))
    assert [choice.text for choice in got.choices] == [completion.text for completion in flat]
    assert [choice.finish_reason for choice in got.choices] == [completion.finish_reason for completion in flat]
    assert got.usage is not None
    assert got.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    assert got.usage.completion_tokens == sum(len(completion.token_ids) for completion in flat)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert (got.model, got.object) == ("tiny", "text_completion")
    assert got.metrics is None


def test_prompts_may_be_token_ids(client: OpenAI, local: LLM) -> None:
    expected = local.generate(PROMPTS[:2], greedy(8), use_tqdm=False)
    ids = [output.prompt_token_ids for output in expected]
    texts = [output.outputs[0].text for output in expected]
    several = client.completions.create(model="small", prompt=ids, temperature=0, max_tokens=8, extra_body=IGNORE_EOS)
    assert [choice.text for choice in several.choices] == texts
    one = client.completions.create(model="small", prompt=ids[0], temperature=0, max_tokens=8, extra_body=IGNORE_EOS)
    assert [choice.text for choice in one.choices] == texts[:1]


def test_chat_equals_chat(client: OpenAI, local: LLM) -> None:
    expected = local.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=20)
    assert got.choices[0].message.content == expected.outputs[0].text
    assert (got.choices[0].message.role, got.object) == ("assistant", "chat.completion")
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    spec = expected.outputs[0].spec_decode_metrics
    assert spec is not None
    assert got.metrics == {"speculative_decoding": spec.to_dict()}
    assert got.metrics["speculative_decoding"]["num_spec_tokens"] == 3
    parts = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Name a city."}]},
    ]
    again = client.chat.completions.create(model="tiny", messages=parts, temperature=0, max_tokens=20)
    assert again.choices[0].message.content == expected.outputs[0].text


def test_without_max_tokens_an_answer_fills_the_context(client: OpenAI) -> None:
    got = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, extra_body=IGNORE_EOS)
    assert got.usage is not None
    assert (got.usage.total_tokens, got.choices[0].finish_reason) == (200, "length")


def test_streamed_completions_join_to_the_whole_ones(client: OpenAI, local: LLM) -> None:
    whole = local.generate(PROMPTS[:2], SamplingParams(temperature=0.8, seed=2, max_tokens=25, n=2), use_tqdm=False)
    flat = [completion for output in whole for completion in output.outputs]
    texts, ends, usages = [""] * 4, [None] * 4, []
    stream = client.completions.create(
        model="tiny", prompt=PROMPTS[:2], temperature=0.8, seed=2, max_tokens=25, n=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [completion.text for completion in flat]
    assert ends == [completion.finish_reason for completion in flat]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1].completion_tokens == sum(len(completion.token_ids) for completion in flat)


def test_streamed_chat_in_its_raw_form(address: str, local: LLM) -> None:
    expected = local.chat(MESSAGES, greedy(20), use_tqdm=False)[0]
    body = {
        "messages": MESSAGES,
        **EXACT,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = httpx.post(f"{address}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]) == expected.outputs[0].text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    spec = expected.outputs[0].spec_decode_metrics
    assert spec is not None
    assert chunks[-1]["metrics"] == {"speculative_decoding": spec.to_dict()}


@pytest.mark.parametrize("included", [False, True])
def test_a_streamed_stop_string(client: OpenAI, local: LLM, included: bool) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    full = local.generate(PROMPTS[0], SamplingParams(**sampling, ignore_eos=True), use_tqdm=False)[0].outputs[0].text
    stop = next(
        part for part in (full[start : start + 3] for start in range(8, 60)) if part.isascii() and len(part) == 3
    )
    extra = {"ignore_eos": True, "include_stop_str_in_output": included}
    stream = client.completions.create(
        model="tiny", prompt=PROMPTS[0], **sampling, stop=[stop, "not in there"], stream=True, extra_body=extra
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == full[: full.find(stop) + (3 if included else 0)]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


def test_stop_token_ids_and_the_end_of_a_sequence(client: OpenAI, local: LLM) -> None:
    output = local.generate(PROMPTS[1], greedy(20), use_tqdm=False)[0].outputs[0]
    token = output.token_ids[6]
    got = client.completions.create(
        model="tiny", prompt=PROMPTS[1], **EXACT, extra_body={"stop_token_ids": [token], "ignore_eos": True}
    )
    assert (got.choices[0].finish_reason, got.choices[0].stop_reason) == ("stop", token)
    assert got.usage is not None
    assert got.usage.completion_tokens == output.token_ids.index(token) + 1


def test_logprobs_of_completions(client: OpenAI, local: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=9, max_tokens=10, logprobs=2, ignore_eos=True)
    expected = local.generate(PROMPTS[2], params, use_tqdm=False)[0].outputs[0]
    assert expected.logprobs is not None
    asked = {"model": "tiny", "prompt": PROMPTS[2], "temperature": 1.5, "seed": 9, "max_tokens": 10, "logprobs": 2}
    got = client.completions.create(**asked, extra_body=IGNORE_EOS).choices[0].logprobs
    assert got is not None
    chosen = [entry[token] for entry, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert got.tokens == [one.decoded_token for one in chosen]
    assert got.token_logprobs == pytest.approx([one.logprob for one in chosen], abs=1e-4)
    assert got.text_offset == [sum(map(len, got.tokens[:place])) for place in range(10)]
    for top, entry in zip(got.top_logprobs, expected.logprobs, strict=True):
        assert max(top.values()) == pytest.approx(max(one.logprob for one in entry.values()), abs=1e-4)
        assert set(top) == {one.decoded_token for one in entry.values()}
    pieces = [
        chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True, extra_body=IGNORE_EOS)
    ]
    assert [token for piece in pieces for token in piece.tokens] == got.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == got.text_offset


def test_logprobs_of_chat(client: OpenAI, local: LLM) -> None:
    expected = local.chat(MESSAGES, greedy(6, logprobs=3), use_tqdm=False)[0].outputs[0]
    assert expected.logprobs is not None
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 6, "logprobs": True}
    got = client.chat.completions.create(**asked, top_logprobs=3, extra_body=IGNORE_EOS).choices[0].logprobs
    assert got is not None
    assert got.content is not None
    for one, token, entry in zip(got.content, expected.token_ids, expected.logprobs, strict=True):
        assert (one.token, one.bytes) == (entry[token].decoded_token, list(one.token.encode()))
        assert one.logprob == pytest.approx(entry[token].logprob, abs=1e-4)
        likeliest = sorted((other.logprob for other in entry.values()), reverse=True)[:3]
        assert [other.logprob for other in one.top_logprobs] == pytest.approx(likeliest, abs=1e-4)
    alone = client.chat.completions.create(**asked, extra_body=IGNORE_EOS).choices[0].logprobs
    assert alone is not None
    assert [one.top_logprobs for one in alone.content or []] == [[]] * 6


def test_concurrent_clients_share_batches(client: OpenAI, served: LLM, local: LLM) -> None:
    prompts = [*PROMPTS, "A function takes a list of numbers"]
    expected = local.generate(prompts, greedy(60), use_tqdm=False)
    batches: list[int] = []
    hook = served.verifier.model.register_forward_pre_hook(
        lambda _, __, options: batches.append(len(options["input_ids"])), with_kwargs=True
    )
    barrier = threading.Barrier(4)

    def ask(prompt: str) -> str:
        barrier.wait()
        got = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=60, extra_body=IGNORE_EOS
        )
        return got.choices[0].text

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(ask, prompts))
    hook.remove()
    assert texts == [output.outputs[0].text for output in expected]
    assert 1 < max(batches) <= 4


def test_models_health_and_version(client: OpenAI, address: str, served: LLM) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    card = client.models.retrieve("small")
    assert (card.object, card.max_model_len, card.root) == ("model", 200, served.verifier.name_or_path)
    with pytest.raises(openai.NotFoundError, match="'large' does not exist here; known: tiny, small") as caught:
        client.completions.create(model="large", prompt="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert httpx.get(f"{address}/health").status_code == 200
    assert httpx.get(f"{address}/version").json()["version"].count(".") == 2
