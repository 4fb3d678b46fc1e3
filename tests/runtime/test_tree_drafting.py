"""Trees of drafts through the engine: answers are those without drafts, whatever is kept; law and counts are right."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from scipy.stats import chi2 as chi2_law
from transformers import AutoModelForCausalLM

from speculators import LLM, SamplingParams
from speculators.cli import main
from speculators.errors import EngineError
from speculators.models.draft_tree import WindowTrees, paths_of
from speculators.models.speculator import Speculator
from speculators.runtime.additional import AdditionalConfig, TreeDraftingConfig
from speculators.runtime.engine import EngineLimits
from speculators.runtime.tree_engine import TreeEngine
from speculators.runtime.verifier import Verifier
from tests.models.by_heart import PROMPT, learnt_by_heart
from tests.models.drafts import randomize
from tests.runtime.asked import Asked
from tests.runtime.laws import LEAST, LENGTH, PROMPTS, TEMPERATURE, codes, compared, stock_law
from tests.runtime.methods import BATCHES
from tests.runtime.parts import random_speculator, random_verifier
from tests.runtime.replaying import ReplayTrees
from tests.runtime.served import KINDS, SMALL, Directories
from tests.runtime.serving import samples, serving
from tests.runtime.test_running_state import verifier_of

FAMILIES = ("eagle", "eagle3")
TREE = {"top_k": 4, "depth": 3, "total_token": 14}
ASKED: dict[str, Asked] = {}


def trees(**keys: int) -> dict[str, dict[str, int]]:
    return {"tree_drafting": {**TREE, **keys}}


def tree_llm(made: Directories, family: str = "eagle3", kind: str = "dense", **keys: Any) -> LLM:
    config = {"model": made.speculator(family, kind), **keys.pop("config", {})}
    keys = {"additional_config": trees(), "max_model_len": 96, **keys}
    return LLM(made.verifier(kind), dtype="float32", speculative_config=config, **keys)


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_draft_is_scored_along_its_own_path(kind: str, made: Directories) -> None:
    """Against transformers on each whole path; what is kept is then read as though there had been a chain."""
    verifier = Verifier.from_pretrained(made.verifier(kind), dtype="float32")
    stock = AutoModelForCausalLM.from_pretrained(made.verifier(kind), dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    cache, rows, starts = verifier.make_cache(4), slice(1, 4), [7, 3, 9]
    texts = torch.randint(2, 300, (3, 9), generator=generator)
    parents = [
        [-1 if i < 2 else int(torch.randint(-1, i, (1,), generator=generator)) for i in range(size)]
        for size in (10, 6, 0)
    ]
    window = torch.randint(2, 300, (3, 11), generator=generator)
    empty = WindowTrees.of([[0] * 0] * 3, torch.device("cpu"))
    for place in range(9):  # one position at a time; longer rows are overwritten
        verifier.forward(texts[:, place : place + 1], cache, empty.write(rows, [place] * 3))
    out = verifier.forward(window, cache, WindowTrees.of(parents, torch.device("cpu")).write(rows, starts))
    assert out.logits_BTV is not None
    kept = []
    for row, start in enumerate(starts):
        prefix, tokens = texts[row, :start].tolist(), window[row].tolist()
        paths = [[], *paths_of(tokens[1 : 1 + len(parents[row])], parents[row])]
        for place, path in enumerate(paths):
            expected = stock(torch.tensor([[*prefix, tokens[0], *path]])).logits[0, -1]
            torch.testing.assert_close(out.logits_BTV[row, place], expected, atol=1e-4, rtol=1e-4)
        deepest = max(range(len(paths)), key=lambda at: len(paths[at]))
        kept.append([0])
        while deepest:
            kept[row].insert(1, deepest)
            deepest = parents[row][deepest - 1] + 1
    assert max(map(len, kept)) > 3
    cache.keep(rows, starts, kept)
    ends = [start + len(places) for start, places in zip(starts, kept, strict=True)]
    last = verifier.forward(torch.full((3, 1), 5), cache, empty.write(rows, ends))
    assert last.logits_BTV is not None
    for row, start in enumerate(starts):
        whole = [*texts[row, :start].tolist(), *window[row, kept[row]].tolist(), 5]
        expected = stock(torch.tensor([whole])).logits[0, -1]
        torch.testing.assert_close(last.logits_BTV[row, 0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_without_drafts(family: str, kind: str, batch: int, made: Directories) -> None:
    """Ends by length, by a token and by a text; more requests than run at once, so that some begin as others end."""
    asked = ASKED.setdefault(kind, Asked(made, kind))
    llm = tree_llm(made, family, kind, max_num_seqs=batch, max_num_batched_tokens=32)
    assert asked.told(llm, asked.count_of(batch)) == asked.plain(asked.count_of(batch))
    assert llm.stats is not None
    assert llm.num_speculative_tokens == 3
    assert 0 < llm.stats.num_drafts <= llm.stats.num_draft_tokens <= 3 * llm.stats.num_drafts


@pytest.mark.parametrize("batch", BATCHES)
def test_of_a_known_tree_as_much_is_kept_as_it_holds(batch: int) -> None:
    """Every fourth token is missing: a step from output i on keeps (3 - i) % 4 drafts, if it has as many levels."""
    verifier, lengths = random_verifier(64), [3 + (7 * i) % 29 for i in range(20)]
    prompts = [[i + 1, 2 * i, 7] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    limits = EngineLimits(max_num_seqs=batch, max_model_len=200)
    plain = LLM.from_parts(verifier, limits=limits).generate(prompts, params, use_tqdm=False)
    known = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in plain}
    llm = LLM.from_parts(verifier, limits=limits)
    llm.engine = TreeEngine(verifier, ReplayTrees(known, 3), limits=limits)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    drafted, accepted = [0, 0, 0], [0, 0, 0]
    for length in lengths:
        done = 1
        while done < length:
            levels = min(3, length - done)
            kept = min((3 - done) % 4, levels)
            drafted = [count + (level < levels) for level, count in enumerate(drafted)]
            accepted = [count + (level < kept) for level, count in enumerate(accepted)]
            done += kept + 1
    stats = llm.engine.stats
    assert stats is not None
    assert (stats.drafted_per_position, stats.accepted_per_position) == (drafted, accepted)
    assert stats.num_draft_tokens == sum(drafted)
    assert stats.acceptance_length == 1 + sum(accepted) / drafted[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_every_step_the_next_tree_is_that_of_a_fresh_start(family: str, made: Directories) -> None:
    """Nothing of a rejected branch stays in the verifier's cache or in the draft's."""
    llm = tree_llm(made, family, additional_config=trees(top_k=20, total_token=120))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.engine.add_request("long", [9, 30, 31, 9], params)
    llm.engine.add_request("short", [12, 7], replace(params, max_tokens=12))
    for i in range(4):
        llm.engine.add_request(str(i), [20 + 7 * i, 3, 5 * i], params)
    compared_after = 0
    while llm.engine.has_unfinished:
        before = {request.request_id: len(request.tokens) for request in llm.engine.running}
        llm.engine.step()
        for request in llm.engine.running:
            if len(request.tokens) - before.get(request.request_id, 99) < 2:
                continue
            fresh = tree_llm(made, family, additional_config=trees(top_k=20, total_token=120)).engine
            fresh.add_request("fresh", request.tokens[:-1], params)
            fresh.step()
            assert fresh.running[0].tokens == request.tokens
            assert (fresh.running[0].drafts, fresh.running[0].draft_parents) == (request.drafts, request.draft_parents)
            compared_after += 1
    assert compared_after >= 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_tree_of_one_path_is_a_chain(family: str, temperature: float, made: Directories) -> None:
    """The same tokens, drawn by the same noise, and the same counts."""
    prompts = [[5, 9, 5, 9], [30], [11, 12, 13, 14]]
    params = [SamplingParams(temperature=temperature, max_tokens=25 + i, seed=i, ignore_eos=True) for i in range(3)]
    tree = tree_llm(made, family, additional_config=trees(top_k=1), max_num_seqs=2)
    chain = tree_llm(made, family, config={"num_speculative_tokens": 3}, additional_config=None, max_num_seqs=2)
    assert tokens_of(tree, prompts, params) == tokens_of(chain, prompts, params)
    assert tree.stats == chain.stats
    assert tree.stats is not None
    assert tree.stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_accepts_no_less_than_a_chain_of_its_depth(family: str) -> None:
    """A draft that knew the answer by heart, with noise on its weights: siblings make up for much of it."""
    learnt = learnt_by_heart(family)
    noisy = Speculator(learnt.speculator.config, learnt.speculator.draft)
    state = {name: tensor.clone() for name, tensor in noisy.draft.state_dict().items()}
    randomize(noisy, 5, 0.06)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    lengths = []
    for top_k in (0, 1, 2, 8):
        tree = AdditionalConfig(tree_drafting=TreeDraftingConfig(top_k, 3, 30) if top_k else None)
        llm = LLM.from_parts(learnt.verifier, noisy, num_speculative_tokens=3, additional=tree)
        tokens = tokens_of(llm, [PROMPT], params)[0]
        assert PROMPT + tokens == learnt.token_ids[: len(PROMPT) + 40]
        assert llm.stats is not None
        lengths.append(llm.stats.acceptance_length)
    noisy.draft.load_state_dict(state)
    assert lengths[0] == lengths[1]
    assert lengths[1] < lengths[3]
    assert lengths[1] <= lengths[2]


def test_seeded_sampling_does_not_depend_on_the_batch(made: Directories) -> None:
    params = [SamplingParams(temperature=0.9, max_tokens=14, seed=100 + i, ignore_eos=True) for i in range(5)]
    prompts = [[i + 1, 2 * i, 7] for i in range(5)]
    params[2] = SamplingParams(temperature=0, max_tokens=9)
    together = tokens_of(tree_llm(made), prompts, params)
    for i in (0, 2, 3):
        assert tokens_of(tree_llm(made), [prompts[i]], params[i]) == [together[i]]


def law_of_engine(made: Directories, family: str, requests: int) -> float:
    """How likely counts as far from the exact law are, of the first four tokens of requests that end at other times."""
    tree = trees(top_k=2, total_token=7)
    llm = tree_llm(made, family, SMALL, max_num_seqs=64, max_model_len=32, additional_config=tree)
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH + i % 5, seed=i, ignore_eos=True)
        for i in range(requests)
    ]
    rows = tokens_of(llm, [PROMPTS[i % 3] for i in range(requests)], params)
    verifier = Verifier.from_pretrained(made.verifier(SMALL), dtype="float32")
    statistic, dof = 0.0, 0
    for place, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([row[:LENGTH] for row in rows[place::3]])
        found, cells, _ = compared(codes(tokens, 3), stock_law(verifier, prompt))
        statistic, dof = statistic + found, dof + cells
    assert llm.stats is not None
    assert llm.stats.num_accepted_tokens > llm.stats.num_drafts / 2
    return float(chi2_law.sf(statistic, dof))


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_answers_follow_the_verifiers_law(family: str, made: Directories) -> None:
    assert law_of_engine(made, family, 1200) > LEAST


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_many_sampled_answers_follow_the_verifiers_law(family: str, made: Directories) -> None:
    assert law_of_engine(made, family, 20_000) > LEAST


def test_a_window_changes_what_is_drafted_and_no_answer(made: Directories) -> None:
    params, prompts = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), [[5, 9, 5, 9, 5, 9]]
    plain = tokens_of(LLM(made.verifier(), dtype="float32", max_model_len=96), prompts, params)
    drafts = []
    for window in ({}, {"draft_window_size": 2}):
        llm = tree_llm(made, additional_config={**trees(), **window})
        llm.engine.add_request("0", prompts[0], params)
        llm.engine.step()
        drafts.append(llm.engine.running[0].drafts)
        assert tokens_of(tree_llm(made, additional_config={**trees(), **window}), prompts, params) == plain
    assert drafts[0] != drafts[1]


def test_no_draft_lies_beyond_the_last_position() -> None:
    verifier, limits = random_verifier(32), EngineLimits(max_num_seqs=2, max_model_len=20)
    params = SamplingParams(temperature=0, max_tokens=None)
    plain = tokens_of(LLM.from_parts(verifier, limits=limits), [[1, 2, 3], [4]], params)
    tree = AdditionalConfig(tree_drafting=TreeDraftingConfig(3, 7, 30))
    llm = LLM.from_parts(verifier, random_speculator(verifier), additional=tree, limits=limits)
    assert tokens_of(llm, [[1, 2, 3], [4]], params) == plain
    assert [len(tokens) for tokens in plain] == [17, 19]


def test_a_server_and_the_command_line_draft_trees(made: Directories, capsys: pytest.CaptureFixture[str]) -> None:
    text, params = "Name three cities near a river", SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(made.verifier(), dtype="float32", max_model_len=96).generate(text, params, use_tqdm=False)[0]
    body = {"model": "m", "prompt": text, "temperature": 0, "max_tokens": 12}
    with serving(tree_llm(made), "m") as address:
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
        counts = samples(address)
    assert answer["choices"][0]["text"] == plain.outputs[0].text
    assert counts["vllm:spec_decode_num_drafts_total", ""] > 0
    positions = {name[1] for name in counts if name[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total"}
    assert positions == {"0", "1", "2"}
    words = ["generate", made.speculator("eagle3"), "--prompt", text, "--max-tokens", "12", "--dtype", "float32"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--additional-config", json.dumps(trees())])
    assert ended.value.code == 0
    assert capsys.readouterr().out == plain.outputs[0].text + "\n"


def test_the_size_is_what_was_asked_for(made: Directories) -> None:
    """Defaults are those of EAGLE-2's reference; the depth takes the place of the one that the draft's file has."""
    llm = tree_llm(made, additional_config={"tree_drafting": {}})
    assert llm.num_speculative_tokens == 7
    assert tree_llm(made, additional_config={"tree_drafting": None}).num_speculative_tokens == 3
    for keys, count in (({}, 14), ({"total_token": 30}, 30), ({"top_k": 2, "total_token": 50}, 2 + 4 + 4)):
        llm = tree_llm(made, additional_config=trees(**keys))
        llm.engine.add_request("0", [4, 5], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        llm.engine.step()
        assert len(llm.engine.running[0].drafts) == count
    with pytest.raises(EngineError, match=r"depth=3 with speculative_config's num_speculative_tokens=4: expected the"):
        tree_llm(made, config={"num_speculative_tokens": 4})


def test_what_cannot_be_a_tree_is_refused(made: Directories) -> None:
    with pytest.raises(EngineError, match=r"top_k=64: expected a whole number in \[1, 3\] \(draft tokens\)"):
        tree_llm(made, kind=SMALL, additional_config=trees(top_k=64))
    verifier = verifier_of("qwen3_next")
    tree = AdditionalConfig(tree_drafting=TreeDraftingConfig(2, 3, 10))
    with pytest.raises(EngineError, match=r"\(qwen3_next\w*\) has linear_attention layers, whose running state"):
        LLM.from_parts(verifier, random_speculator(verifier), additional=tree)
    parallel = Speculator.from_pretrained(made.speculator("peagle"))
    loaded = Verifier.from_pretrained(made.verifier(), dtype="float32")
    with pytest.raises(EngineError, match="a peagle draft makes no token from the one before"):
        LLM.from_parts(loaded, parallel, additional=tree)
    with pytest.raises(EngineError, match="got method 'eagle3' and parallel_drafting: expected a draft of method eag"):
        tree_llm(made, "peagle")
    with pytest.raises(EngineError, match="got method 'medusa': expected a draft of method eagle or eagle3"):
        tree_llm(made, "medusa")
