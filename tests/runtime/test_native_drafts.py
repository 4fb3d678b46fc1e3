"""Verifiers whose own checkpoint has an MTP block: it is read without training, and answers stay the verifier's."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from speculators.errors import FormatError, SpeculatorsError, UsageError, VerifierError
from speculators.formats.mtp_names import NativeLayout, deepseek_layout, mimo_layout, qwen_layout
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.attention_interface import ATTENTION_NAME
from speculators.models.draft_model import PackedBatch
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.native import to_native
from speculators.models.mtp.objective import MtpObjective
from speculators.models.speculator import Speculator
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.models.drafts import randomize
from tests.models.mtp.verifiers import RAW
from tests.runtime.draft_models import answers, tokens_of
from tests.tiny_models import make_verifier

LAYOUTS = {
    "deepseek": deepseek_layout(4),
    "glm": deepseek_layout(4),
    "qwen3_next": qwen_layout(),
    "qwen3_next_dense": qwen_layout(),
    "mimo": mimo_layout(),
}
PROMPTS = [[7, 21, 3, 15, 9], [1, 2], [30] * 11, [5], [8, 9, 10, 11]]
# transformers has no class for MiMo, whose layers are those of Qwen2.
AS = {"mimo": "qwen2"}


def raw_of(style: str) -> dict[str, Any]:
    return {key: value for key, value in RAW[style].items() if key not in ("quantization_config", "auto_map")}


def verifier_of(style: str) -> Verifier:
    """A random verifier of this style; those of Qwen3-Next have linear attention in half of their layers."""
    raw = raw_of(style) | {"bos_token_id": None, "eos_token_id": None}
    kind = raw.pop("model_type")
    config = AutoConfig.for_model(AS.get(kind, kind), **raw)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return Verifier(model, None, name_or_path=style)


def block_for(verifier: Verifier, style: str) -> Speculator:
    shape = VerifierShape.from_config_dict({**raw_of(style), "architectures": ["X"]}, style)
    speculator = Speculator.create(MtpDraft().resolve(shape), VerifierWeights.from_model(verifier.model), seed=3)
    randomize(speculator, seed=9, deviation=0.05)
    return speculator


def own_tensors(speculator: Speculator) -> dict[str, Tensor]:
    state = speculator.draft.state_dict().items()
    return {name: tensor.detach() for name, tensor in state if name.startswith("mtp_layers.")}


def save(folder: Path, verifier: Verifier, style: str, block: Speculator, layout: NativeLayout | None = None) -> Path:
    """The verifier's directory with the block under its native names, experts one by one."""
    verifier.model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw_of(style) | {"architectures": ["X"]}), encoding="utf-8")
    ours, layout = own_tensors(block), layout or LAYOUTS[style]
    experts = block.config.transformer_layer_config.num_routed_experts
    native = to_native(layout.native_origins(ours, experts), ours)
    tensors = load_file(folder / "model.safetensors") | {name: tensor.contiguous() for name, tensor in native.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def check_served(style: str, folder: Path, pairs: Iterable[tuple[int, int]]) -> None:
    """The block comes back bit by bit, and its drafts change no answer at any (depth, batch)."""
    verifier = verifier_of(style)
    block = block_for(verifier, style)
    speculator = Speculator.from_verifier(save(folder, verifier, style, block), "mtp")
    assert speculator.num_speculative_tokens == 1
    assert set(speculator.draft.missing_tensors()) == {"embed_tokens.weight", "lm_head.weight"}
    found = own_tensors(speculator)
    for name, tensor in own_tensors(block).items():
        assert torch.equal(found[name], tensor), name
    speculator.attach_verifier(VerifierWeights.from_model(verifier.model))
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    plain = tokens_of(answers(verifier, None, PROMPTS, params, batch=3)[0])
    for depth, batch in pairs:
        proposer = DraftHeadProposer(speculator.draft, depth, batch)
        outputs, engine = answers(verifier, proposer, PROMPTS, params, batch=batch)
        assert tokens_of(outputs) == plain
        assert engine.stats is not None
        assert engine.stats.num_draft_tokens == depth * engine.stats.num_drafts > 0


@pytest.mark.parametrize("style", LAYOUTS)
def test_a_block_is_read_as_it_is_stored_and_answers_stay_the_verifiers(style: str, tmp_path: Path) -> None:
    check_served(style, tmp_path / "verifier", [(1, 16), (3, 3)])


@pytest.mark.full
@pytest.mark.parametrize("style", LAYOUTS)
def test_answers_stay_the_verifiers_in_every_depth_and_batch(style: str, tmp_path: Path) -> None:
    check_served(style, tmp_path / "verifier", itertools.product((1, 2, 3, 5, 7, 16), (1, 3, 16)))


def test_a_trained_block_is_accepted_from_the_checkpoint(tmp_path: Path) -> None:
    """It learnt one answer by heart: two tokens a step from the second on."""
    verifier = verifier_of("deepseek")
    block = Speculator.create(
        block_for(verifier, "deepseek").config, VerifierWeights.from_model(verifier.model), seed=3
    )
    params = [SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)]
    plain = tokens_of(answers(verifier, None, PROMPTS[:1], params, batch=1)[0])
    ids = PROMPTS[0] + plain[0]
    states_TH = verifier.capture([ids], [4])[0][:, 0].clone()
    batch = PackedBatch(
        input_ids=torch.tensor([ids]),
        loss_mask=torch.ones(1, len(ids), dtype=torch.bool),
        aux_hidden_states=states_TH.new_zeros(1, len(ids), 0),
        last_hidden_states=states_TH[None],
        document_ids=torch.zeros(1, len(ids), dtype=torch.int64),
        position_ids=torch.arange(len(ids))[None],
    )
    head, objective = VerifierHead.from_weights(VerifierWeights.from_model(verifier.model)), MtpObjective(num_steps=1)
    optimizer = torch.optim.Adam(list(block.draft.trained_parameters()), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        objective.step(block.draft, batch, head).loss.backward()
        optimizer.step()
    speculator = Speculator.from_verifier(save(tmp_path / "verifier", verifier, "deepseek", block), "mtp")
    speculator.attach_verifier(VerifierWeights.from_model(verifier.model))
    outputs, engine = answers(verifier, DraftHeadProposer(speculator.draft, 1, 1), PROMPTS[:1], params, batch=1)
    assert tokens_of(outputs) == plain
    assert engine.stats is not None
    assert engine.stats.num_drafts == engine.stats.num_accepted_tokens == 10


def test_a_nested_configuration_of_a_multimodal_verifier_is_read(tmp_path: Path) -> None:
    """Qwen3.5 says `mtp_num_hidden_layers` in its text part."""
    raw = RAW["qwen3_5"]
    shape = VerifierShape.from_config_dict({**raw, "architectures": ["X"]}, "qwen3_5")
    block = Speculator.create(MtpDraft().resolve(shape), weights_for(raw), seed=3)
    ours = own_tensors(block)
    native = to_native(qwen_layout().native_origins(ours, 0), ours)
    weights = weights_for(raw)
    ends = {
        "model.language_model.embed_tokens.weight": weights.embed_tokens,
        "lm_head.weight": weights.lm_head,
        "model.language_model.norm.weight": weights.final_norm,
    }
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in (native | ends).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["X"], "model_type": "qwen3_5", "text_config": raw})
    )
    found = own_tensors(Speculator.from_verifier(tmp_path, "mtp"))
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())


def weights_for(raw: dict[str, Any]) -> VerifierWeights:
    table = torch.randn(raw["vocab_size"], raw["hidden_size"], generator=torch.Generator().manual_seed(1))
    return VerifierWeights(table, table + 1, torch.ones(raw["hidden_size"]), norm_eps=1e-6)


def test_verifiers_without_a_block_say_what_else_there_is(tiny_verifier: Path, tmp_path: Path) -> None:
    advice = r"method eagle3\), or with a small model \(method draft_model\)"
    with pytest.raises(VerifierError, match=f"no mtp layer among its tensors, nor says its configuration.*{advice}"):
        Speculator.from_verifier(tiny_verifier, "mtp")
    folder = make_verifier(tmp_path / "verifier", num_layers=2)

    def configured(**changes: object) -> Path:
        config = json.loads((tiny_verifier / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        return folder

    with pytest.raises(
        VerifierError, match=f"no mtp layer among its tensors, although its configuration says 1.*{advice}"
    ):
        Speculator.from_verifier(configured(num_nextn_predict_layers=1), "mtp")
    with pytest.raises(VerifierError, match=f"no mtp layer .* although its configuration says 3.*{advice}"):
        Speculator.from_verifier(configured(mtp_num_hidden_layers=3), "mtp")
    with pytest.raises(VerifierError, match=f"has 17 mtp layers of its own; drafts of up to 16 are known.*{advice}"):
        Speculator.from_verifier(configured(mtp_num_hidden_layers=17), "mtp")
    with pytest.raises(UsageError, match="num_nextn_predict_layers is 'two'; expected a whole number"):
        Speculator.from_verifier(configured(num_nextn_predict_layers="two"), "mtp")
    with pytest.raises(VerifierError, match=f"is of type 'gemma3_text'; MTP blocks are known for.*{advice}"):
        Speculator.from_verifier(configured(model_type="gemma3_text"), "mtp")
    with pytest.raises(SpeculatorsError, match="no eagle3 layer among its tensors"):
        Speculator.from_verifier(tiny_verifier, "eagle3")
    with pytest.raises(FormatError, match="'nothing'; expected one of"):
        Speculator.from_verifier(tiny_verifier, "nothing")
