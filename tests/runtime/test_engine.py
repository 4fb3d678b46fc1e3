"""The engine against stock transformers: same greedy tokens with and without speculation, in every batch."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.errors import RequestError
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier

PROMPTS = [
    "The quick brown fox",
    "Write a short letter to a friend about the weather, the garden and the price of apples. " * 3,
    "What is the sum?",
    "Name",
    "A function takes a list of numbers and returns the largest one: def largest(numbers):",
    "rain fell all night, the road was closed, and the school stayed open. rain fell all night",
]


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left."""
    done = {}
    while engine.has_unfinished:
        for output in engine.step():
            done[output.request_id] = output
    return done


def stock_greedy(directory: Path, prompts: list[list[int]], length: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = []
    for ids in prompts:
        row = torch.tensor([ids])
        out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=length, do_sample=False)
        answers.append(out[0, len(ids) :].tolist())
    return answers


def test_plain_greedy_equals_stock_transformers(tiny_verifier: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    llm = LLM(tiny_verifier, dtype="float32", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == stock_greedy(tiny_verifier, ids, 24)
    assert [output.prompt_token_ids for output in outputs] == ids


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_speculation_leaves_greedy_output_unchanged(tiny_verifier: Path, batch: int, depth: int) -> None:
    """Mixed lengths, requests that finish while others start, more requests than slots."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    speculator = random_speculator(verifier, draft_vocab_size=100)
    params = [SamplingParams(temperature=0, max_tokens=7 + 5 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    limits = EngineLimits(max_num_seqs=batch, max_model_len=200, max_num_batched_tokens=48)
    plain = LLM.from_parts(verifier, limits=limits).generate(PROMPTS, params, use_tqdm=False)
    llm = LLM.from_parts(verifier, speculator, num_speculative_tokens=depth, limits=limits)
    drafted = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].text for o in drafted] == [o.outputs[0].text for o in plain]
    assert llm.stats is not None
    assert llm.stats.num_drafts > 0
    assert llm.stats.num_draft_tokens <= depth * llm.stats.num_drafts


def test_drafts_of_the_verifier_itself_are_all_accepted(tiny_verifier: Path) -> None:
    """A proposer that knows the greedy continuation is accepted in full, and counts say so."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    plain = LLM.from_parts(verifier).generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    llm = LLM.from_parts(verifier, random_speculator(verifier), num_speculative_tokens=3)
    engine = llm.engine

    def know(new: object, num_tokens: int) -> object:
        from speculators.models.draft_model import Proposal

        done = len(engine.running[0].output_token_ids)
        known = (plain + [0] * num_tokens)[done : done + num_tokens]
        return Proposal(torch.tensor([known]), torch.tensor([num_tokens]))

    engine.proposer.propose = know
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == plain
    # 1 token before the first draft, then three steps of four tokens.
    assert engine.stats is not None
    assert (engine.stats.num_drafts, engine.stats.accepted_per_position) == (3, [3, 3, 3])
    assert output.accepted == [False, *[True, True, True, False] * 3]
    assert output.spec_decode_metrics is not None
    assert output.spec_decode_metrics.to_dict()["acceptance_histogram"] == [0, 0, 0, 3]


def test_length_limit_is_never_passed() -> None:
    """Drafts near max_model_len are cut so that no position lies beyond it."""
    verifier = random_verifier(32)
    limits = EngineLimits(max_num_seqs=2, max_model_len=20)
    params = SamplingParams(temperature=0, max_tokens=None)
    plain = LLM.from_parts(verifier, limits=limits).generate([[1, 2, 3], [4]], params, use_tqdm=False)
    llm = LLM.from_parts(verifier, random_speculator(verifier), num_speculative_tokens=7, limits=limits)
    drafted = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert other.outputs[0].finish_reason == "length"
        assert len(other.prompt_token_ids) + len(other.outputs[0].token_ids) == 20


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    """A seed fixes a request's tokens, alone or among others, in any slot."""
    verifier = random_verifier(32)
    speculator = random_speculator(verifier)
    params = [SamplingParams(temperature=0.9, max_tokens=12, seed=100 + i) for i in range(5)]
    prompts = [[i + 1, 2 * i, 7] for i in range(5)]
    for method in ("greedy", "probabilistic"):
        together = LLM.from_parts(verifier, speculator, draft_sample_method=method)
        tokens = [o.outputs[0].token_ids for o in together.generate(prompts, params, use_tqdm=False)]
        for i in (0, 3):
            alone = LLM.from_parts(verifier, speculator, draft_sample_method=method)
            assert alone.generate([prompts[i]], params[i], use_tqdm=False)[0].outputs[0].token_ids == tokens[i]


def test_logprobs_are_those_of_the_raw_logits(tiny_verifier: Path) -> None:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    llm = LLM.from_parts(verifier, random_speculator(verifier))
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, logprobs=3)
    output = llm.generate(PROMPTS[4], params, use_tqdm=False)[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    law = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)[len(output.prompt_token_ids) - 1 :]
    assert output.outputs[0].logprobs is not None
    for place, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
        expected = law[place].topk(3)
        assert set(expected.indices.tolist()) <= set(entry)
        for candidate, got in entry.items():
            assert abs(got.logprob - float(law[place, candidate])) < 1e-4
            assert got.rank == int((law[place] > law[place, candidate]).sum()) + 1
        assert token in entry


def test_stop_strings_and_ids_end_inside_an_accepted_run(tiny_verifier: Path) -> None:
    """Text is cut at the stop string; a stop id is kept as a token; what follows is dropped."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    full = LLM.from_parts(verifier).generate(PROMPTS[1], free, use_tqdm=False)[0].outputs[0]
    stop = full.text[len(full.text) // 2 :][:3]
    llm = LLM.from_parts(verifier, random_speculator(verifier))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    output = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0]
    assert output.text == full.text[: full.text.find(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    token = full.token_ids[9]
    by_id = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    output = llm.generate(PROMPTS[1], by_id, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == full.token_ids[: full.token_ids.index(token) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_abort_frees_the_slot() -> None:
    verifier = random_verifier(32)
    engine = Engine(
        verifier,
        DraftHeadProposer(random_speculator(verifier).draft, 2, 2),
        limits=EngineLimits(max_num_seqs=2, max_model_len=64),
    )
    for name in "abc":
        engine.add_request(name, [1, 2, ord(name) % 32], SamplingParams(temperature=0, max_tokens=10))
    engine.step()
    engine.abort("a")
    done = run(engine)
    assert set(done) == {"b", "c"}
    alone = Engine(verifier, limits=EngineLimits(max_num_seqs=2, max_model_len=64))
    for name in "bc":
        alone.add_request(name, [1, 2, ord(name) % 32], SamplingParams(temperature=0, max_tokens=10))
    expected = run(alone)
    assert all(done[n].outputs[0].token_ids == expected[n].outputs[0].token_ids for n in "bc")


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), (list(range(8)) * 8, "max_model_len"), ([99], "outside 0..31")]
)
def test_bad_prompts_are_refused(prompt: list[int], words: str) -> None:
    engine = Engine(random_verifier(32), limits=EngineLimits(max_model_len=64))
    with pytest.raises(RequestError, match=words):
        engine.add_request("x", prompt, SamplingParams())


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    engine = Engine(random_verifier(8), limits=EngineLimits(max_num_seqs=1, max_model_len=16))
    params = SamplingParams(temperature=1.0, max_tokens=2)
    for request_id in ("running", "waiting", "ended"):
        engine.add_request(request_id, [1, 2], params)
    engine.step()
    for request_id in ("running", "waiting"):
        with pytest.raises(RequestError, match=f"request {request_id}: this id is already being served"):
            engine.add_request(request_id, [1, 2], params)
    # Noise is made for those that run alone, however many wait.
    assert [request.noise is None for request in (*engine.running, *engine.waiting)] == [False, True, True]
    engine.abort("waiting")
    engine.add_request("waiting", [1, 2], params)
    engine.abort_all()
    for request_id in ("running", "waiting", "ended"):
        engine.add_request(request_id, [1, 2], params)
    assert sorted(run(engine)) == ["ended", "running", "waiting"]
    engine.add_request("running", [1, 2], params)
    assert list(run(engine)) == ["running"]
