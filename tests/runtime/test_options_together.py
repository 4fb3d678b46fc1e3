"""Random requests under options of separate parts together: answers are those of the verifier alone, one at a time.

Requests share beginnings, are sampled or greedy, guided, penalised, ended by texts, tokens or their clients, and want
logits told; they arrive at random, so that batches change. The second time, all prompts are in the prefix cache.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from speculators.runtime.llm import LLM
from speculators.runtime.outputs import Logprob, RequestOutput
from speculators.runtime.sampling import SamplingParams
from tests.runtime.methods import BY_NAME
from tests.runtime.served import GEMMA, Directories

TREE = {"tree_drafting": {"top_k": 4, "depth": 3, "total_token": 14}}
TABLE = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 0], [3, 8, 2]]}
DRAWN = {"draft_sample_method": "probabilistic"}
ADAPTIVE = {"enable_adaptive_verification": True}


@dataclass(frozen=True)
class Together:
    """A method, the verifier that it drafts for, and further keys."""

    method: str
    kind: str = "dense"
    speculative: Mapping[str, Any] | None = None
    additional: Mapping[str, Any] | None = None

    @property
    def steady(self) -> bool:
        """Whether what is drafted for a request does not depend on others, or on time: then neither do its draws."""
        return self.method != "suffix" and self.speculative in (None, DRAWN)

    def llm(self, made: Directories, **keys: Any) -> LLM:
        depth = {} if self.additional else {"num_speculative_tokens": 3}
        config = {**BY_NAME[self.method].config(made, self.kind), **depth, **(self.speculative or {})}
        return alone(made, self.kind, speculative_config=config, additional_config=self.additional, **keys)


QUICK = (
    Together("eagle3", "sliding window", None, TREE),
    Together("draft_model", "sliding window", DRAWN),
    Together("mtp", "dense", TABLE),
)
OTHERS = (
    Together("eagle", "dense", None, TREE),
    Together("eagle3", GEMMA, None, TREE),
    Together("eagle3", "sliding window", None, {**TREE, "draft_window_size": 5}),
    Together("mtp (Gemma 4 assistant)", GEMMA, DRAWN),
    Together("mtp (Gemma 4 assistant)", GEMMA, TABLE),
    Together("mtp (Gemma 4 assistant)", GEMMA, ADAPTIVE),
    Together("mtp", "mixture of experts", DRAWN),
    Together("mtp", "dense", ADAPTIVE),
    Together("eagle3", "dense", {**DRAWN, "rejection_sample_method": "block"}),
    Together("eagle3", "dense", {"max_model_len": 40}),
    Together("draft_model", "dense", ADAPTIVE),
    Together("draft_model (PARD)", "dense", TABLE),
    Together("dspark", "dense", ADAPTIVE),
    Together("dflash", "dense", TABLE),
    Together("suffix"),
    Together("ngram_gpu", "dense", TABLE),
)


def alone(made: Directories, kind: str, **keys: Any) -> LLM:
    return LLM(made.verifier(kind), dtype="float32", max_model_len=96, **keys)


@dataclass(frozen=True)
class Wanted:
    """A request, and after how many tokens its client goes away."""

    prompt: list[int]
    params: SamplingParams
    leaves: int | None


def wanted(seed: int, count: int = 14) -> list[Wanted]:
    chance = random.Random(seed)
    beginnings = [[chance.randrange(2, 100) for _ in range(chance.randrange(18, 60))] for _ in range(2)]
    found: list[Wanted] = []
    for _ in range(count):
        base = chance.choice(beginnings)
        cut = chance.choice([0, len(base), chance.randrange(len(base))])
        prompt = [*base[:cut], *(chance.randrange(2, 100) for _ in range(chance.choice([1, 3, 8])))]
        if found and chance.random() < 0.15:
            prompt = chance.choice(found).prompt
        keys: dict[str, Any] = {"max_tokens": chance.randrange(1, 22), "ignore_eos": chance.random() < 0.6}
        for share, more in (
            (0.25, {"logprobs": chance.randrange(3)}),
            (0.25, {"prompt_logprobs": chance.randrange(3)}),
            (0.3, {"stop": [chance.choice("abcdefghij"), chance.choice("klmnopqrst") + "e"]}),
            (0.2, {"stop_token_ids": [chance.randrange(100) for _ in range(30)]}),
            (0.15, {"repetition_penalty": 1.4, "frequency_penalty": 0.4}),
            (0.15, {"logit_bias": {chance.randrange(100): 4.0 for _ in range(5)}}),
            (0.15, {"structured_outputs": {"regex": r"[a-f]{3,9}-(oak|apples) [0-9]{2}"}}),
        ):
            if chance.random() < share:
                keys |= more
        temperature = chance.choice([0.0, 0.0, 0.0, 0.8])
        params = SamplingParams(temperature=temperature, seed=chance.randrange(1 << 30), **keys)
        found.append(Wanted(prompt, params, chance.randrange(1, 12) if chance.random() < 0.2 else None))
    return found


def told(llm: LLM, asked: Sequence[Wanted], seed: int, names: str = "") -> list[RequestOutput]:
    """The last output of each request; requests arrive by chance, some a step and some together."""
    chance, engine, last = random.Random(seed), llm.engine, dict[str, RequestOutput]()
    coming = list(enumerate(asked))
    while coming or engine.has_unfinished:
        for place, one in coming[: chance.choice([0, 1, 1, 2, 5])]:
            coming.remove((place, one))
            engine.add_request(f"{names}{place}", one.prompt, one.params)
        moved = engine.step() if engine.has_unfinished else []
        for output in moved:
            last[output.request_id] = output
            leaves = asked[int(output.request_id.removeprefix(names))].leaves
            if leaves is not None and len(output.outputs[0].token_ids) >= leaves:
                engine.abort(output.request_id)
    return [last[f"{names}{place}"] for place in range(len(asked))]


def same_logprobs(
    found: Sequence[Mapping[int, Logprob] | None] | None, expected: Sequence[Mapping[int, Logprob] | None] | None
) -> bool:
    if found is None or expected is None:
        return found is expected
    pairs = list(zip(found, expected, strict=True))
    return all(
        (one or {}).keys() == (other or {}).keys()
        and all(entry.logprob == pytest.approx((other or {})[token].logprob, abs=2e-3) for token, entry in one.items())
        for one, other in pairs
        if one is not None or other is not None
    )


def compare(made: Directories, case: Together, seed: int) -> None:
    asked, chance = wanted(seed), random.Random(seed)
    unending = [Wanted(one.prompt, one.params, None) for one in asked]
    plain = told(alone(made, case.kind, max_num_seqs=1), unending, 0)
    drawn: dict[int, list[list[int]]] = {}
    for caching in (False, True):
        sizes = {"max_num_seqs": chance.choice([2, 3, 5]), "max_num_batched_tokens": chance.choice([6, 40, 2048])}
        llm = case.llm(made, enable_prefix_caching=caching, **sizes)
        for turn in range(2):
            outputs = told(llm, asked, 7 * seed + 2 * caching + turn, f"{turn}-")
            for place, (one, output, expected) in enumerate(zip(asked, outputs, plain, strict=True)):
                here = f"{case}, request {place}, caching {caching}, turn {turn}, {sizes}"
                found, right = output.outputs[0], expected.outputs[0]
                assert same_logprobs(output.prompt_logprobs, expected.prompt_logprobs), here
                if one.params.greedy and output.finished:
                    assert found.token_ids == right.token_ids, here
                    assert (found.text, found.finish_reason, found.stop_reason) == (
                        right.text,
                        right.finish_reason,
                        right.stop_reason,
                    ), here
                    assert same_logprobs(found.logprobs, right.logprobs), here
                elif one.params.greedy:
                    assert found.token_ids == right.token_ids[: len(found.token_ids)], here
                elif output.finished and one.leaves is None:
                    drawn.setdefault(place, []).append(found.token_ids)
        assert (llm.engine.prefixes is not None and llm.engine.prefixes.hits > 0) is caching
        assert llm.stats is not None
    if case.steady:
        assert all(one == many[0] for many in drawn.values() for one in many), case


def name_of(case: Together) -> str:
    keys = [*(case.speculative or ()), *(case.additional or ())]
    return ", ".join([case.method, case.kind, *keys])


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_answers_are_those_of_the_verifier_alone(case: Together, made: Directories) -> None:
    compare(made, case, 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("case", [*QUICK, *OTHERS], ids=name_of)
def test_answers_are_those_of_the_verifier_alone_in_more_ways(case: Together, seed: int, made: Directories) -> None:
    compare(made, case, seed)
