"""Verifiers whose own checkpoint has several MTP blocks: block i drafts token i, and answers stay the verifier's."""

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.errors import EngineError, FormatError, SpeculatorsError, VerifierError
from speculators.formats.mtp_names import deepseek_layout, find_layouts, mimo_layout, qwen_layout
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.cache import SlotWrite
from speculators.models.family import VerifierShape
from speculators.models.mtp.config import MtpConfig
from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.native import to_native
from speculators.models.speculator import Speculator
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.models.drafts import randomize
from tests.models.mtp.dense import DenseBlock
from tests.runtime.draft_models import answers, tokens_of
from tests.runtime.served import word_tokenizer
from tests.runtime.test_native_drafts import PROMPTS, raw_of, verifier_of

# How each kind of checkpoint says how many blocks it has, and names block i of n.
STYLES: dict[str, Any] = {
    "mimo": ("num_nextn_predict_layers", lambda i, n: mimo_layout(i)),
    "deepseek": ("num_nextn_predict_layers", lambda i, n: deepseek_layout(4, i)),
    "qwen3_window": ("num_nextn_predict_layers", lambda i, n: deepseek_layout(4, i)),
    "glm": ("num_nextn_predict_layers", lambda i, n: deepseek_layout(4, i)),
    "qwen3_next": ("num_nextn_predict_layers", qwen_layout),
    "qwen3_5": ("mtp_num_hidden_layers", qwen_layout),
}
AROUND = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
DEPTHS, BATCHES = (1, 2, 3, 5, 7, 16), (1, 3, 16)
PARAMS = [SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]


def configured(style: str, count: int) -> dict[str, Any]:
    return {**raw_of(style), STYLES[style][0]: count, "architectures": ["X"]}


@cache
def verifier(style: str) -> Verifier:
    return verifier_of(style)


@cache
def plain(style: str) -> list[list[int]]:
    return tokens_of(answers(verifier(style), None, PROMPTS, PARAMS, batch=3)[0])


@cache
def blocks_of(style: str, count: int) -> Speculator:
    """Random blocks; those of Qwen share everything but their layer."""
    config = MtpDraft(num_speculative_tokens=count).resolve_native(
        VerifierShape.from_config_dict(configured(style, count), style), count
    )
    speculator = Speculator.create(config, VerifierWeights.from_model(verifier(style).model), seed=3)
    randomize(speculator, seed=9, deviation=0.05)
    if STYLES[style][1] is qwen_layout:
        state = speculator.draft.state_dict()
        for index, name in itertools.product(range(1, count), AROUND):
            state[f"mtp_layers.{index}.{name}.weight"].copy_(state[f"mtp_layers.0.{name}.weight"])
    return speculator


def own(speculator: Speculator, index: int) -> dict[str, Tensor]:
    state = speculator.draft.state_dict().items()
    return {name: tensor.detach() for name, tensor in state if name.startswith(f"mtp_layers.{index}.")}


def save(folder: Path, style: str, count: int, *, left_out: str = "nothing") -> Path:
    """A verifier's directory with its blocks under their native names, experts one by one."""
    block = blocks_of(style, count)
    verifier(style).model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(configured(style, count)), encoding="utf-8")
    word_tokenizer(verifier(style).vocab_size).save_pretrained(folder)
    experts = block.config.transformer_layer_config.num_routed_experts
    tensors = load_file(folder / "model.safetensors")
    for index in range(count):
        ours = own(block, index)
        tensors |= to_native(STYLES[style][1](index, count).native_origins(ours, experts), ours)
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


class Chain:
    """The blocks by hand, over whole sequences: no cache, nothing kept from round to round."""

    def __init__(self, style: str, count: int) -> None:
        speculator, self.verifier = blocks_of(style, count), verifier(style)
        around = {name: tensor.detach() for name, tensor in speculator.draft.state_dict().items() if "mtp" not in name}
        self.head_VH = around["lm_head.weight"]
        self.blocks = [
            DenseBlock(
                style, around | {f"mtp_layers.0.{name[13:]}": tensor for name, tensor in own(speculator, i).items()}
            ).eval()
            for i in range(count)
        ]

    @torch.no_grad()
    def drafted(self, tokens: list[int], depth: int) -> tuple[list[int], Tensor]:
        """Greedy drafts behind `tokens`, of which all but the last are verified, and their logits [K, V]."""
        cache = self.verifier.make_cache(1)
        ids = torch.tensor([tokens[:-1]])
        write = SlotWrite.at(slice(0, 1), [0], len(tokens) - 1, ids.device)
        states_TH = self.verifier.forward(ids, cache, write).normed_BTH[0]
        drafts: list[int] = []
        logits: list[Tensor] = []
        while len(drafts) < depth:
            known, hidden_TH, outputs = [*tokens, *drafts], states_TH, []
            for step, block in enumerate(self.blocks):
                text = known + drafts[len(known) - len(tokens) :]
                hidden_TH = block(torch.tensor(text[step + 1 :]), hidden_TH)
                outputs.append(hidden_TH[-1])
                logits.append(self.head_VH @ outputs[-1])
                drafts.append(int(logits[-1].argmax()))
            # The next turn takes the outputs of this one for the verifier's states.
            states_TH = torch.cat((states_TH, torch.stack(outputs)))
        return drafts[:depth], torch.stack(logits[:depth])


class Watched(DraftHeadProposer):
    """Keeps what every proposal began with, and its logits; drafts fewer tokens in some rounds."""

    uneven = False

    def propose(self, new: NewTokens, num_tokens: int) -> Any:
        if self.uneven:
            num_tokens = 1 + (len(self.seen) % num_tokens)
        logits: list[Tensor] = []
        handle = self.draft.lm_head.register_forward_hook(lambda *call: logits.append(call[2][:, 0]))
        proposal = super().propose(new, num_tokens)
        handle.remove()
        tokens = [list(request.tokens) for request in new.requests]
        self.seen.append((tokens, proposal.token_ids_BK.tolist(), torch.stack(logits, 1)))
        return proposal

    @property
    def seen(self) -> list[tuple[list[list[int]], list[list[int]], Tensor]]:
        """What was kept so far."""
        kept: list[Any] = vars(self).setdefault("kept", [])
        return kept


@pytest.mark.parametrize(
    ("style", "count", "depth", "uneven"),
    [
        ("mimo", 3, 3, False),
        ("mimo", 2, 4, True),
        ("mimo", 2, 8, False),
        ("mimo", 3, 9, True),
        ("deepseek", 2, 2, False),
        ("qwen3_window", 2, 2, False),
        ("glm", 3, 3, True),
        ("qwen3_next", 2, 2, False),
        ("qwen3_5", 2, 4, False),
    ],
)
def test_proposals_are_those_of_the_blocks_over_whole_sequences(
    style: str, count: int, depth: int, uneven: bool
) -> None:
    """After rejections and acceptances, prompts in chunks, rows that move, and rounds of fewer drafts."""
    proposer, chain = Watched(blocks_of(style, count).draft, depth, 3), Chain(style, count)
    proposer.uneven = uneven
    long = [[(3 * i) % 37 + 1 for i in range(40)], *PROMPTS[:4]]
    outputs, _ = answers(verifier(style), proposer, long, PARAMS, batch=3)
    assert tokens_of(outputs) == tokens_of(answers(verifier(style), None, long, PARAMS, batch=3)[0])
    compared = 0
    for tokens, ids_BK, logits_BKV in proposer.seen[::2]:
        for row, text in enumerate(tokens):
            drafts, expected_KV = chain.drafted(text, len(ids_BK[row]))
            assert ids_BK[row] == drafts
            torch.testing.assert_close(logits_BKV[row], expected_KV, atol=1e-4, rtol=1e-5)
            compared += 1
    assert compared > 10


def check_lossless(style: str, count: int, depth: int, batch: int) -> None:
    outputs, engine = answers(
        verifier(style), DraftHeadProposer(blocks_of(style, count).draft, depth, batch), PROMPTS, PARAMS, batch=batch
    )
    assert tokens_of(outputs) == plain(style)
    assert engine.stats is not None
    assert engine.stats.num_draft_tokens == depth * engine.stats.num_drafts > 0


@pytest.mark.parametrize(("style", "depth", "batch"), [("mimo", 3, 16), ("glm", 1, 3), ("qwen3_next", 7, 3)])
def test_drafts_change_no_answer(style: str, depth: int, batch: int) -> None:
    check_lossless(style, 2, depth, batch)


@pytest.mark.full
@pytest.mark.parametrize(("depth", "batch"), list(itertools.product(DEPTHS, BATCHES)))
@pytest.mark.parametrize("style", STYLES)
def test_drafts_change_no_answer_at_any_depth_and_batch(style: str, depth: int, batch: int) -> None:
    check_lossless(style, 3 if style == "mimo" else 2, depth, batch)


@pytest.mark.parametrize("style", STYLES)
def test_blocks_are_read_as_they_are_stored(style: str, tmp_path: Path) -> None:
    count = 3 if style == "mimo" else 2
    speculator = Speculator.from_verifier(save(tmp_path / "verifier", style, count), "mtp")
    assert speculator.num_speculative_tokens == count
    assert speculator.config.network().startswith(f"{count} blocks, each of 1 `")
    for index in range(count):
        found = own(speculator, index)
        assert found.keys() == own(blocks_of(style, count), index).keys()
        for name, tensor in own(blocks_of(style, count), index).items():
            assert torch.equal(found[name], tensor), name
    with pytest.raises(FormatError, match=f"{count} MTP blocks: .* says num_nextn_predict_layers 1; serve these from"):
        speculator.save_pretrained(tmp_path / "speculator")
    assert not (tmp_path / "speculator").exists()


def test_an_llm_drafts_with_all_blocks(tmp_path: Path) -> None:
    """As many tokens as there are blocks unless told otherwise, or a multiple of that (vLLM has the same rule)."""
    folder = str(save(tmp_path / "verifier", "glm", 2))
    asked = [PROMPTS, PARAMS]
    told = LLM(folder, dtype="float32").generate(*asked, use_tqdm=False)
    for depth in (None, 1, 4):
        llm = LLM(folder, dtype="float32", speculative_config={"method": "mtp", "num_speculative_tokens": depth})
        assert llm.num_speculative_tokens == (depth or 2)
        found = llm.generate(*asked, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in told]
    with pytest.raises(SpeculatorsError, match=r"the 2 blocks of .* draft in turn; expected at most 2, or a multiple"):
        LLM(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 3})


def test_what_a_checkpoint_does_not_have_is_named(tmp_path: Path) -> None:
    for style, lost in (("glm", "model.layers.5."), ("mimo", "model.mtp_layers.1."), ("qwen3_next", "mtp.layers.1.")):
        folder = save(tmp_path / style, style, 2, left_out=lost)
        with pytest.raises(FormatError, match=f"is not followed by {lost}; expected 2 MTP blocks"):
            Speculator.from_verifier(folder, "mtp")
    folder = save(tmp_path / "more", "glm", 3)
    (folder / "config.json").write_text(json.dumps(configured("glm", 2)), encoding="utf-8")
    with pytest.raises(FormatError, match=r"is followed by model.layers.6.; expected 2 MTP blocks"):
        Speculator.from_verifier(folder, "mtp")
    (folder / "config.json").write_text(json.dumps(configured("glm", 17)), encoding="utf-8")
    with pytest.raises(VerifierError, match="has 17 mtp layers of its own; drafts of up to 16 are known"):
        Speculator.from_verifier(folder, "mtp")
    assert find_layouts(["model.embed_tokens.weight"], 4, 2) == []


def test_a_speculators_file_says_one_block() -> None:
    shape = VerifierShape.from_config_dict(configured("glm", 1), "glm")
    written = MtpDraft().resolve(shape).to_json()
    assert written["num_nextn_predict_layers"] == 1
    with pytest.raises(FormatError, match="num_nextn_predict_layers"):
        MtpConfig.from_json(written | {"num_nextn_predict_layers": 2})


def test_several_blocks_cannot_begin_inside_another_request() -> None:
    proposer = DraftHeadProposer(blocks_of("mimo", 2).draft, 2, 4)
    with pytest.raises(EngineError, match="enable_prefix_caching: a draft of several blocks"):
        Engine(verifier("mimo"), proposer, limits=EngineLimits(2, 64, 64, True))
    Engine(verifier("mimo"), proposer, limits=EngineLimits(2, 64, 64))
