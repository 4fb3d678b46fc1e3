"""Layers with a running state: what a rejection, padding or another request leaves behind is never read."""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from speculators.errors import EngineError, VerifierError
from speculators.models.cache import SlotWrite
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.draft_model import DraftModelProposer
from speculators.runtime.proposers.ngram import NgramProposer
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.step_costs import measure_costs
from speculators.runtime.verifier import Verifier
from tests.runtime.draft_models import CONTEXT, PROMPTS, answers, greedy_params, model_of, tokens_of
from tests.runtime.parts import random_speculator
from tests.verifier_configs import SIZES, TINY, VOCAB

DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SHORT = ("lfm2", "lfm2_moe")
MAMBA = ("bamba", "granitemoehybrid", "falcon_h1", "falcon_h1_normed", "nemotron_h")
KINDS = (*DELTA, *SHORT, *MAMBA)
DEPTHS, BATCHES = (1, 2, 3, 5, 7, 16), (1, 3, 16)


@cache
def verifier_of(kind: str, noise: float = 0.0) -> Verifier:
    return model_of(TINY[kind]().get_text_config(), noise=noise)


@cache
def stock(kind: str) -> PreTrainedModel:
    """The same weights in transformers' own attention and recurrence."""
    verifier = verifier_of(kind)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(verifier.config), attn_implementation="eager")
    model.load_state_dict(verifier.model.state_dict())
    return model.eval()


@torch.no_grad()
def logits_of(kind: str, ids: Sequence[int]) -> Tensor:
    """Transformers' logits [T, V] of a whole sequence."""
    return stock(kind)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


@cache
def generated(kind: str) -> list[list[int]]:
    """What transformers' own generate answers to `PROMPTS`."""
    found = []
    for prompt, params in zip(PROMPTS, greedy_params(), strict=True):
        row = torch.tensor([prompt])
        options = {"max_new_tokens": params.max_tokens, "do_sample": False, "eos_token_id": None}
        found.append(
            stock(kind).generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()
        )
    return found


def sequences(count: int, length: int) -> list[list[int]]:
    return torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(5)).tolist()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


class Rows:
    """Several sequences in a slot cache, written piece by piece; padding is noise."""

    def __init__(self, kind: str, num_slots: int) -> None:
        self.verifier = verifier_of(kind)
        self.cache = self.verifier.make_cache(num_slots)

    def write(
        self,
        pieces: Sequence[Sequence[int]],
        starts: list[int],
        *,
        first: int = 0,
        settled: list[int] | None = None,
        need_lengths: bool = True,
    ) -> list[Tensor]:
        """Logits [length, V] of each row's piece, rows from `first` on."""
        lengths = [len(piece) for piece in pieces]
        width = max(lengths)
        ids = torch.tensor([[*piece, *[33] * (width - len(piece))] for piece in pieces])
        rows, device = slice(first, first + len(pieces)), self.verifier.device
        given = lengths if need_lengths else None
        write = SlotWrite.at(rows, starts, width, device, lengths=given, settled=settled)
        logits = self.verifier.forward(ids, self.cache, write).logits_BTV
        assert logits is not None
        return [row[:length] for row, length in zip(logits, lengths, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settle", [True, False])
def test_ragged_pieces_give_transformers_logits(kind: str, settle: bool) -> None:
    """Of 1 to 29 tokens, with padding in between, whether or not the write says how much of it stays."""
    rows, texts = Rows(kind, 4), sequences(3, 40)
    ends = [(7, 2, 1), (8, 3, 13), (9, 26, 14), (38, 27, 15), (40, 40, 16)]
    starts, found = [0, 0, 0], [[], [], []]
    for stop in ends:
        pieces = [text[start:end] for text, start, end in zip(texts, starts, stop, strict=True)]
        settled = list(stop) if settle else None
        # Row 0 is somebody else's.
        for logits, part in zip(
            found, rows.write(pieces, starts, first=1, settled=settled, need_lengths=settle), strict=True
        ):
            logits.append(part)
        starts = list(stop)
    for text, end, logits in zip(texts, starts, found, strict=True):
        assert_close(torch.cat(logits), logits_of(kind, text[:end]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_rejected_is_forgotten_whatever_each_row_accepted(kind: str) -> None:
    rows, texts = Rows(kind, 3), sequences(3, 40)
    rows.write([text[:4] for text in texts], [0, 0, 0], settled=[4, 4, 4])
    done = [4, 4, 4]
    for accepted in ((0, 1, 5), (5, 0, 2), (1, 1, 1), (3, 5, 0), (0, 0, 0)):
        # One token that stays and five drafts, wrong ones after as many right ones as the row accepts.
        windows = [
            text[at : at + 1 + count] + [(text[at + 1 + count] + 1) % VOCAB] * (5 - count)
            for text, at, count in zip(texts, done, accepted, strict=True)
        ]
        found = rows.write(windows, list(done), settled=[at + 1 for at in done])
        for text, at, count, logits in zip(texts, done, accepted, found, strict=True):
            assert_close(logits[: 1 + count], logits_of(kind, text[: at + 1 + count])[at:])
        done = [at + 1 + count for at, count in zip(done, accepted, strict=True)]


def test_a_row_that_moves_takes_its_state_along_and_a_new_request_begins_without_one() -> None:
    """Also in the middle of a window: what was accepted of it moves too."""
    kind = "qwen3_next"
    rows, (one, two, three) = Rows(kind, 2), sequences(3, 20)
    rows.write([one[:9], two[:9]], [0, 0], settled=[5, 5])
    rows.cache.move(1, 0, 9)
    (moved,) = rows.write([two[7:12]], [7], settled=[8])
    assert_close(moved, logits_of(kind, two[:12])[7:])
    # Of the last window three tokens were accepted; the new request takes the row that two was in.
    going_on, fresh = rows.write([two[10:13], three[:6]], [10, 0], settled=[11, 2])
    assert_close(going_on, logits_of(kind, two[:13])[10:])
    assert_close(fresh, logits_of(kind, three[:6]))
    rests = rows.write([two[13:], three[6:]], [13, 6])
    assert_close(rests[0], logits_of(kind, two)[13:])
    assert_close(rests[1], logits_of(kind, three)[6:])


def test_a_write_that_the_state_cannot_go_on_from_is_refused() -> None:
    rows, (text,) = Rows("qwen3_next", 1), sequences(1, 20)
    rows.write([text[:8]], [0], settled=[6])
    for start in (5, 9):
        with pytest.raises(EngineError, match=f"write at position {start}, but .* has read 6 tokens and 2 wait"):
            rows.write([text[start : start + 2]], [start])
    rows.write([text[6:9]], [6])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(kind: str) -> None:
    """Prompts in chunks of 24 tokens a pass, of which more wait than run, so that some start where others end."""
    for batch in BATCHES:
        assert tokens_of(answers(verifier_of(kind), None, PROMPTS, greedy_params(), batch=batch)[0]) == generated(kind)


def proposer_of(method: str, kind: str, depth: int, batch: int) -> Proposer:
    if method == "eagle3":
        return DraftHeadProposer(random_speculator(verifier_of(kind)).draft, depth, batch)
    if method == "ngram":
        return NgramProposer(depth, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=CONTEXT)
    return DraftModelProposer(verifier_of(kind, {"same": 0.0, "near": 0.02}[method]), depth, batch)


def check_lossless(method: str, kind: str, depth: int, batch: int) -> None:
    outputs, engine = answers(
        verifier_of(kind), proposer_of(method, kind, depth, batch), PROMPTS, greedy_params(), batch=batch
    )
    assert tokens_of(outputs) == generated(kind)
    stats = engine.stats
    assert stats is not None
    assert stats.num_draft_tokens > 0
    if method == "same":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    elif method == "near":
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(("depth", "batch"), [(1, 16), (3, 3), (7, 16)])
@pytest.mark.parametrize("method", ["eagle3", "ngram", "same", "near"])
def test_drafts_change_no_answer(method: str, depth: int, batch: int) -> None:
    check_lossless(method, "qwen3_next", depth, batch)


@pytest.mark.parametrize("kind", [*SHORT, *MAMBA])
@pytest.mark.parametrize(("method", "depth", "batch"), [("eagle3", 3, 3), ("ngram", 7, 16), ("near", 5, 3)])
def test_drafts_change_no_answer_of_another_kind(kind: str, method: str, depth: int, batch: int) -> None:
    check_lossless(method, kind, depth, batch)


@pytest.mark.full
@pytest.mark.parametrize(("depth", "batch"), list(itertools.product(DEPTHS, BATCHES)))
@pytest.mark.parametrize("method", ["eagle3", "ngram", "same", "near"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "lfm2", "bamba", "falcon_h1", "nemotron_h"])
def test_drafts_change_no_answer_at_any_depth_and_batch(kind: str, method: str, depth: int, batch: int) -> None:
    check_lossless(method, kind, depth, batch)


@pytest.mark.parametrize(
    ("kind", "depth"),
    [*(("qwen3_next", depth) for depth in DEPTHS), ("lfm2", 2), ("bamba", 3), ("falcon_h1", 5), ("nemotron_h", 7)],
)
def test_looked_up_drafts_are_accepted_in_part(kind: str, depth: int) -> None:
    """Texts over six tokens repeat themselves, so that windows are rejected anywhere."""
    config = TINY[kind]()
    config.vocab_size = 6
    verifier = model_of(config)
    prompts = [[3, 5, 3, 5, 3], [4], [1, 2, 3, 1, 2, 3], [5] * 7, [0, 4, 4, 0, 4, 4, 0], [2, 1]]
    params = [SamplingParams(temperature=0, max_tokens=20 + 3 * i, ignore_eos=True) for i in range(len(prompts))]
    plain = tokens_of(answers(verifier, None, prompts, params, batch=1)[0])
    for batch in BATCHES:
        proposer = NgramProposer(depth, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=CONTEXT)
        outputs, engine = answers(verifier, proposer, prompts, params, batch=batch)
        assert tokens_of(outputs) == plain
        assert engine.stats is not None
        assert 10 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_a_request_begins_in_the_step_in_which_another_ends() -> None:
    """Its row was just in use, and the other row's window is half accepted."""
    verifier, near = verifier_of("qwen3_next"), verifier_of("qwen3_next", 0.02)
    limits = EngineLimits(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=24)
    engine = Engine(verifier, DraftModelProposer(near, 3, 2), limits=limits)
    for i, (prompt, params) in enumerate(zip(PROMPTS, greedy_params(), strict=True)):
        engine.add_request(str(i), prompt, params)
    done, replaced = {}, 0
    while engine.has_unfinished:
        before = {request.request_id for request in engine.running}
        done |= {output.request_id: output for output in engine.step() if output.finished}
        now = {request.request_id for request in engine.running}
        replaced += bool(before & now and now - before)
    assert replaced > 3
    assert [done[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))] == generated("qwen3_next")


def test_costs_are_measured_behind_a_context_that_was_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", "20")
    proposer = DraftHeadProposer(random_speculator(verifier_of("qwen3_next")).draft, 2, 2)
    costs = measure_costs(verifier_of("qwen3_next"), proposer, max_num_seqs=2, max_model_len=40)
    assert set(costs.verify) == {1, 2}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (lambda: JambaConfig(**SIZES, num_experts=2, mamba_d_state=4), r"\(jamba\) has linear_attention layers"),
        (
            lambda: Mamba2Config(vocab_size=64, hidden_size=32, num_heads=8, head_dim=8, num_hidden_layers=2),
            r"\(mamba2\)",
        ),
    ],
)
def test_other_running_states_are_refused_by_name(config: Callable[[], PreTrainedConfig], kinds: str) -> None:
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(VerifierError, match=kinds + ".*serve it with vLLM.*qwen3_next"):
        Verifier(model, None)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_windows_that_roll_past_hold_under_rejection(kind: str) -> None:
    """Windows of 4 tokens, which texts of up to 34 and drafts of 7 leave behind."""
    assert verifier_of(kind).config.sliding_window == 4
    plain = generated(kind)
    for method, depth, batch in (("ngram", 3, 3), ("same", 7, 3), ("near", 5, 16)):
        outputs, engine = answers(
            verifier_of(kind), proposer_of(method, kind, depth, batch), PROMPTS, greedy_params(), batch=batch
        )
        assert tokens_of(outputs) == plain
        assert engine.stats is not None
        assert engine.stats.num_accepted_tokens > 0
