"""Assistants of Gemma 4: their proposals are those of transformers' own class, and answers stay the verifier's."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

from speculators.errors import EngineError, SpeculatorsError
from speculators.models.gemma4_assistant.network import Gemma4Assistant
from speculators.runtime.llm import LLM
from speculators.runtime.proposers.gemma4_assistant import Gemma4AssistantProposer
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.draft_models import PROMPTS, answers, greedy_params, model_of, tokens_of
from tests.runtime.served import (
    GEMMA,
    Directories,
    assistant_config,
    gemma4_config,
    save_assistant,
)

VOCAB = 64
DEPTHS, BATCHES = (1, 2, 3, 5, 7, 16), (1, 3, 16)
# Keys with values of their own in both kinds of layers, and full attention whose values are its keys.
VERIFIERS: dict[str, dict[str, Any]] = {
    "shared": {},
    "k_eq_v": {
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
}


def verifier_of(kind: str) -> Verifier:
    return model_of(gemma4_config(VOCAB, **VERIFIERS[kind]))


class Stock:
    """Transformers' verifier in its own attention, and what its cache would share with an assistant."""

    def __init__(self, verifier: Verifier, assistant: PreTrainedModel) -> None:
        self.model = type(verifier.model)(type(verifier.config).from_dict(verifier.config.to_dict())).eval()
        self.model.load_state_dict(verifier.model.state_dict())
        self.assistant = assistant.eval()

    @torch.no_grad()
    def drafted(self, tokens: list[int], depth: int) -> tuple[list[int], Tensor]:
        """Greedy drafts behind `tokens`, of which all but the last are verified, and their logits [K, V]."""
        position = len(tokens) - 2
        out = self.model.model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False, return_shared_kv_states=True)
        window = self.assistant.config.get_text_config().sliding_window
        shared = dict(out.shared_kv_states.items())
        shared["sliding_attention"] = tuple(states[:, :, -window:] for states in shared["sliding_attention"])
        hidden, token, drafts, logits = out.last_hidden_state[:, -1:], tokens[-1], [], []
        for _ in range(depth):
            embedded = self.model.get_input_embeddings()(torch.tensor([[token]]))
            step = self.assistant(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
            )
            hidden, token = step.last_hidden_state, int(step.logits.argmax())
            drafts.append(token)
            logits.append(step.logits[0, 0])
        return drafts, torch.stack(logits)


class Watched(Gemma4AssistantProposer):
    """Keeps what every proposal began with, and its logits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[list[int]], list[list[int]], Tensor]] = []

    def propose(self, new: NewTokens, num_tokens: int) -> Any:
        logits: list[Tensor] = []
        handle = self.assistant.register_forward_hook(lambda *call: logits.append(call[2][0]))
        proposal = super().propose(new, num_tokens)
        handle.remove()
        tokens = [list(request.tokens) for request in new.requests]
        self.seen.append((tokens, proposal.token_ids_BK.tolist(), torch.stack(logits, 1)))
        return proposal


def assistant_of(folder: Path, verifier: Verifier, **options: Any) -> tuple[Gemma4Assistant, PreTrainedModel]:
    """One and the same assistant, read by us and by transformers."""
    save_assistant(folder, assistant_config(verifier.config, **options))
    return Gemma4Assistant.from_pretrained(folder), Gemma4AssistantForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", VERIFIERS)
def test_proposals_are_those_of_transformers(kind: str, ordered: bool, tmp_path: Path) -> None:
    """After every step of a batch whose drafts are rejected and accepted, behind windows and in rows that move."""
    verifier = verifier_of(kind)
    mine, theirs = assistant_of(tmp_path, verifier, ordered=ordered)
    stock, proposer = Stock(verifier, theirs), Watched(mine, verifier, 3)
    answers(verifier, proposer, PROMPTS[:8], greedy_params()[:8], batch=3)
    compared = 0
    for tokens, ids_BK, logits_BKV in proposer.seen[::3]:
        for row, text in enumerate(tokens):
            drafts, expected_KV = stock.drafted(text, 3)
            assert ids_BK[row] == drafts
            scored = logits_BKV[row].isfinite()
            assert scored.sum(1).tolist() == [VOCAB // 4 if ordered else VOCAB] * 3
            torch.testing.assert_close(logits_BKV[row][scored], expected_KV[scored], atol=1e-4, rtol=1e-5)
            if ordered:
                # Theirs give all others one value below the least.
                for seen_V, expected_V in zip(scored, expected_KV, strict=True):
                    assert expected_V[~seen_V].max() < expected_V[seen_V].min()
            compared += 1
    assert compared > 12


def test_a_unified_assistant_is_the_same_network(tmp_path: Path) -> None:
    verifier = model_of(gemma4_config(VOCAB, **VERIFIERS["k_eq_v"]))
    save_assistant(tmp_path / "plain", assistant_config(verifier.config))
    plain = Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    text = {
        key: value
        for key, value in plain.config.text_config.to_dict().items()
        if key not in ("model_type", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
    }
    config = Gemma4UnifiedAssistantConfig(
        text_config=Gemma4UnifiedTextConfig(**text), backbone_hidden_size=verifier.hidden_size
    )
    unified = Gemma4UnifiedAssistantForCausalLM(config)
    unified.load_state_dict(plain.state_dict())
    unified.save_pretrained(tmp_path / "unified")
    mine = Gemma4Assistant.from_pretrained(tmp_path / "unified")
    proposer = Watched(mine, verifier, 2)
    answers(verifier, proposer, PROMPTS[:3], greedy_params()[:3], batch=3)
    stock = Stock(verifier, unified)
    for tokens, ids_BK, _ in proposer.seen:
        assert ids_BK == [stock.drafted(text, 2)[0] for text in tokens]


def test_a_head_of_its_own_is_read(tmp_path: Path) -> None:
    verifier = verifier_of("shared")
    mine, theirs = assistant_of(tmp_path, verifier, tie_word_embeddings=False)
    assert mine.lm_head is not None
    torch.testing.assert_close(mine.lm_head.weight, theirs.get_output_embeddings().weight.detach())


def check_lossless(made: Directories, depth: int, batch: int, *, ordered: bool = True) -> None:
    verifier = Verifier.from_pretrained(made.verifier(GEMMA), dtype="float32")
    proposer = Gemma4AssistantProposer(
        Gemma4Assistant.from_pretrained(Path(made.assistant(ordered=ordered))), verifier, depth
    )
    plain = tokens_of(answers(verifier, None, PROMPTS, greedy_params(), batch=1)[0])
    outputs, engine = answers(verifier, proposer, PROMPTS, greedy_params(), batch=batch)
    assert tokens_of(outputs) == plain
    assert engine.stats is not None
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize(("depth", "batch"), [(1, 16), (3, 3), (7, 1)])
def test_drafts_change_no_answer(depth: int, batch: int, made: Directories) -> None:
    check_lossless(made, depth, batch)


@pytest.mark.full
@pytest.mark.parametrize(("depth", "batch"), list(itertools.product(DEPTHS, BATCHES)))
def test_drafts_change_no_answer_at_any_depth_and_batch(depth: int, batch: int, made: Directories) -> None:
    check_lossless(made, depth, batch, ordered=depth % 2 == 0)


def test_drafts_that_are_right_are_accepted(made: Directories, tmp_path: Path) -> None:
    """One head for both, whose only likely token is one and the same."""
    folder = shutil.copytree(made.verifier(GEMMA), tmp_path / "verifier")
    assistant = shutil.copytree(made.assistant(ordered=False), tmp_path / "assistant")
    for path, name in ((folder, "model.norm.weight"), (assistant, "model.norm.weight")):
        tensors = load_file(path / "model.safetensors")
        tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    llm = LLM(
        str(folder),
        dtype="float32",
        speculative_config={"method": "mtp", "model": str(assistant), "num_speculative_tokens": 3},
    )
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == [0] * 9
    assert llm.stats is not None
    assert llm.stats.num_accepted_tokens == 6


def test_sampled_answers_do_not_depend_on_how_they_are_batched(made: Directories) -> None:
    config = {"model": made.assistant(), "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    params = [SamplingParams(temperature=0.9, max_tokens=9, seed=i, ignore_eos=True) for i in range(6)]
    found = []
    for batch in (1, 3):
        llm = LLM(made.verifier(GEMMA), dtype="float32", speculative_config=config, max_num_seqs=batch)
        outputs = llm.generate(PROMPTS[:6], params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"backbone_hidden_size": 48}, "has hidden_size 32; .* expects 48: give the assistant that was made for"),
    ({}, {"vocab_size": 128}, "has vocab_size [0-9]+; .* expects 128"),
    (
        {"layer_types": ["full_attention"] * 6},
        {},
        "has no sliding_attention layer with keys of its own; .* expects one, which layer 0 reads",
    ),
    ({}, {"head_dim": 16}, "has 2 key heads of size 8 in layer 3; .* such that 4 query heads of size 16 read them"),
    ({"model_type": "llama"}, {}, "is of type 'llama'; .* expects gemma4_text or gemma4_unified_text"),
]


@pytest.mark.parametrize(("theirs", "mine", "words"), REFUSED)
def test_an_assistant_of_another_verifier_is_refused_before_its_weights_are_read(
    theirs: dict[str, Any], mine: dict[str, Any], words: str, made: Directories, tmp_path: Path
) -> None:
    verifier = shutil.copytree(made.verifier(GEMMA), tmp_path / "verifier", ignore=shutil.ignore_patterns("*.safe*"))
    path = verifier / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "layer_types" in theirs:
        # Which heads are larger follows from the types of layers.
        config.pop("per_layer_config", None)
    path.write_text(json.dumps(config | theirs), encoding="utf-8")
    known = Gemma4TextConfig.from_pretrained(made.verifier(GEMMA))
    folder = save_assistant(tmp_path / "assistant", assistant_config(known, **mine))
    with pytest.raises(EngineError, match=words):
        LLM(str(verifier), speculative_config={"model": str(folder), "num_speculative_tokens": 2})


def test_files_that_are_no_assistants_are_refused_by_name(made: Directories, tmp_path: Path) -> None:
    folder = shutil.copytree(made.assistant(), tmp_path / "assistant")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def refused(words: str, **changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        with pytest.raises(SpeculatorsError, match=words):
            LLM(made.verifier(GEMMA), speculative_config={"model": str(folder), "num_speculative_tokens": 2})

    refused("groups of equal size of [0-9]+ tokens", num_centroids=7)
    refused("no more of them than there are", centroid_intermediate_top_k=9)
    refused("its config.json cannot be read", text_config=config["text_config"] | {"enable_moe_block": True})
    refused("is of type 'llama'; expected one of gemma4_text", text_config={"model_type": "llama"})
    del tensors["model.layers.2.self_attn.q_norm.weight"]
    save_file(tensors | {"model.layers.0.self_attn.k_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    refused(r"(?s)q_norm.weight is missing.*k_proj.weight belongs to no part of the draft")


def test_the_method_and_the_depth_follow_from_the_files(made: Directories) -> None:
    for config in ({}, {"method": "mtp"}, {"method": "gemma4_mtp"}):
        llm = LLM(made.verifier(GEMMA), dtype="float32", speculative_config={"model": made.assistant(), **config})
        assert llm.num_speculative_tokens == 1
        llm.close()
    with pytest.raises(EngineError, match=r"method='draft_model', but .* is for method 'mtp' .*give that one"):
        LLM(made.verifier(GEMMA), speculative_config={"method": "draft_model", "model": made.assistant()})
