"""The verifier's embedding, head and final norm: the right tensors, or an error that says which are meant."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from speculators.errors import VerifierError
from speculators.formats.norm_gain import GAIN_PLUS_ONE, adds_one, class_adds_one
from speculators.formats.verifier_weights import VerifierWeights, load_verifier_weights
from tests.formats.eagle3_directory import GOLDEN

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=False)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, layer_types=["full_attention"] * 2)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**SIZES, layer_types=["full_attention"] * 2, num_experts=4, num_experts_per_tok=2)
    ),
}


def random_model(kind: str) -> PreTrainedModel:
    """A tiny model whose norms are far from their initial values."""
    model = MODELS[kind]()
    model.train(False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.copy_(0.2 + 2.8 * noise if "norm" in name else noise - 0.5)
    return model


def logits_from(weights: VerifierWeights, before_norm: torch.Tensor) -> torch.Tensor:
    gain = weights.final_norm + 1 if weights.plus_one else weights.final_norm
    normed = before_norm * torch.rsqrt(before_norm.pow(2).mean(-1, keepdim=True) + weights.norm_eps) * gain
    logits = weights.scale * normed @ weights.lm_head.T
    return logits if weights.softcap is None else weights.softcap * torch.tanh(logits / weights.softcap)


@torch.no_grad()
def last_state_and_logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    seen = []
    handle = model.get_decoder().norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    logits = model(input_ids=torch.arange(12)[None]).logits
    handle.remove()
    return seen[0], logits


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_rebuilt_from_the_state_before_the_final_norm(kind: str, tmp_path: Path) -> None:
    """Pitfall 1 and pitfall 2: the norm is applied once, as its family means it; random gains make a slip visible."""
    model = random_model(kind)
    state, logits = last_state_and_logits(model)
    model.save_pretrained(tmp_path)
    weights = load_verifier_weights(tmp_path)
    torch.testing.assert_close(logits_from(weights, state), logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(weights.embed_tokens, model.get_parameter("model.embed_tokens.weight"))
    in_process = VerifierWeights.from_model(model)
    torch.testing.assert_close(logits_from(in_process, state), logits, atol=1e-4, rtol=1e-4)
    assert in_process.lm_head.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    random_model("llama tied").save_pretrained(tmp_path)
    weights = load_verifier_weights(tmp_path)
    assert weights.lm_head is weights.embed_tokens


def test_sharded_verifiers_are_read_from_the_files_that_matter(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "whole")
    random_model("llama").save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    whole, parts = load_verifier_weights(tmp_path / "whole"), load_verifier_weights(tmp_path / "parts")
    for name in ("embed_tokens", "lm_head", "final_norm"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_golden_verifier_keeps_its_dtype() -> None:
    tensors = load_file(GOLDEN / "verifier" / "model.safetensors")
    weights = load_verifier_weights(GOLDEN / "verifier")
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"])
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    assert weights.lm_head.dtype == torch.bfloat16
    assert (weights.norm_eps, weights.plus_one, weights.softcap, weights.scale) == (1e-6, False, None, 1.0)


def write_verifier(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5} | config))
    return directory


def plain(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, torch.Tensor]:
    tensors = {prefix + "embed_tokens.weight": torch.rand(12, 4), prefix + "norm.weight": torch.rand(4)}
    return tensors | ({} if head is None else {head: torch.rand(12, 4)})


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")],
)
def test_the_language_part_of_a_multimodal_model_is_taken(tmp_path: Path, prefix: str, head: str) -> None:
    """Pitfall 3: other tensors end in norm.weight too; their names decide, not their endings."""
    decoys = {
        "vision.norm.weight": torch.rand(6),
        "model.visual.norm.weight": torch.rand(6),
        "audio.final_norm.weight": torch.rand(6),
        prefix + "layers.0.input_layernorm.weight": torch.rand(4),
    }
    tensors = plain(prefix, head)
    text = {"model_type": "gemma3_text", "rms_norm_eps": 1e-4, "tie_word_embeddings": False}
    weights = load_verifier_weights(write_verifier(tmp_path, tensors | decoys, model_type="vl", text_config=text))
    assert torch.equal(weights.final_norm, tensors[prefix + "norm.weight"])
    assert torch.equal(weights.lm_head, tensors[head])
    assert (weights.norm_eps, weights.plus_one) == (1e-4, True)


class TestTies:
    def test_config_says_untied(self, tmp_path: Path) -> None:
        tensors = plain()
        weights = load_verifier_weights(write_verifier(tmp_path, tensors, tie_word_embeddings=False))
        assert torch.equal(weights.lm_head, tensors["lm_head.weight"])

    def test_config_says_tied_although_a_head_is_stored(self, tmp_path: Path) -> None:
        weights = load_verifier_weights(write_verifier(tmp_path, plain(), tie_word_embeddings=True))
        assert torch.equal(weights.lm_head, weights.embed_tokens)

    def test_nothing_said_and_no_head(self, tmp_path: Path) -> None:
        weights = load_verifier_weights(write_verifier(tmp_path, plain(head=None)))
        assert torch.equal(weights.lm_head, weights.embed_tokens)

    def test_nothing_said_and_equal(self, tmp_path: Path) -> None:
        tensors = plain()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        weights = load_verifier_weights(write_verifier(tmp_path, tensors))
        assert torch.equal(weights.lm_head, weights.embed_tokens)

    @pytest.mark.parametrize(
        "config", [{}, {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}]
    )
    def test_nothing_certain_and_different(self, tmp_path: Path, config: dict[str, Any]) -> None:
        with pytest.raises(VerifierError, match="tie_word_embeddings"):
            load_verifier_weights(write_verifier(tmp_path, plain(), **config))

    def test_untied_without_a_head(self, tmp_path: Path) -> None:
        with pytest.raises(VerifierError, match=r"no lm_head\.weight"):
            load_verifier_weights(write_verifier(tmp_path, plain(head=None), tie_word_embeddings=False))

    @pytest.mark.parametrize("flag", ["yes", 1, [None], {}])
    def test_a_flag_that_is_none_is_refused(self, tmp_path: Path, flag: Any) -> None:
        with pytest.raises(VerifierError, match=r"tie_word_embeddings is .*; expected true or false"):
            load_verifier_weights(write_verifier(tmp_path, plain(), tie_word_embeddings=flag))


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"model.language_model.norm.weight": torch.rand(4)}, {}, "final norm is ambiguous"),
        ({"language_model.lm_head.weight": torch.rand(12, 4)}, {}, "output head is ambiguous"),
        ({"lm_head.bias": torch.rand(12)}, {}, "biases"),
        ({"model.norm.bias": torch.rand(4)}, {}, "biases"),
        ({"model.embed_tokens.weight": torch.zeros(12, 4, dtype=torch.int8)}, {}, "quantised"),
        ({"model.embed_tokens.weight": torch.zeros(12, 4).to(torch.float8_e4m3fn)}, {}, "quantised"),
        ({"model.embed_tokens.weight": torch.rand(12, 6)}, {}, "embed_tokens.weight is \\[12, 6\\]"),
        ({"lm_head.weight": torch.rand(10, 4)}, {}, "expected alike"),
        ({}, {"rms_norm_eps": None}, "no rms_norm_eps"),
        ({}, {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({}, {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"model.norm.weight": None}, {}, "no final norm"),
        ({"model.embed_tokens.weight": None}, {}, "no input embedding"),
    ],
)
def test_unsuitable_verifiers_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], config: dict[str, Any], words: str
) -> None:
    """No other tensor is taken for the final norm or the head (pitfall 3)."""
    tensors = {name: tensor for name, tensor in (plain() | change).items() if tensor is not None}
    with pytest.raises(VerifierError, match=words):
        load_verifier_weights(write_verifier(tmp_path, tensors, tie_word_embeddings=False, **config))


def test_unreadable_verifiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"config\.json is missing"):
        load_verifier_weights(tmp_path / "nowhere")
    write_verifier(tmp_path, plain())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(VerifierError, match="truncated"):
        load_verifier_weights(tmp_path)


# Where each model type's text decoder lives in transformers, and the class of its final norm.
NORM_CLASSES = {
    "gemma": ("gemma", "GemmaRMSNorm"),
    "gemma2": ("gemma2", "Gemma2RMSNorm"),
    "gemma3": ("gemma3", "Gemma3RMSNorm"),
    "gemma3_text": ("gemma3", "Gemma3RMSNorm"),
    "recurrent_gemma": ("recurrent_gemma", "RecurrentGemmaRMSNorm"),
    "vaultgemma": ("vaultgemma", "VaultGemmaRMSNorm"),
    "qwen3_next": ("qwen3_next", "Qwen3NextRMSNorm"),
    "qwen3_5": ("qwen3_5", "Qwen3_5RMSNorm"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5RMSNorm"),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpTextRMSNorm"),
    "qwen4_exp_text": ("qwen4_exp", "Qwen4ExpTextRMSNorm"),
    "minimax_m3_vl_text": ("minimax_m3_vl", "MiniMaxM3VLRMSNorm"),
    "gemma3n": ("gemma3n", "Gemma3nRMSNorm"),
    "gemma4": ("gemma4", "Gemma4RMSNorm"),
    "llama": ("llama", "LlamaRMSNorm"),
    "mistral": ("mistral", "MistralRMSNorm"),
    "qwen2": ("qwen2", "Qwen2RMSNorm"),
    "qwen3": ("qwen3", "Qwen3RMSNorm"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeRMSNorm"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3RMSNorm"),
    "gpt_oss": ("gpt_oss", "GptOssRMSNorm"),
    "granite": ("granite", "GraniteRMSNorm"),
}


@pytest.mark.parametrize("model_type", sorted(GAIN_PLUS_ONE | NORM_CLASSES.keys()))
def test_which_norms_add_one_is_what_transformers_does(model_type: str) -> None:
    """With its weight at 0 a norm that adds one lets the input through; any other kills it (pitfall 2)."""
    module, name = NORM_CLASSES[model_type]
    norm_class = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    norm = norm_class(4)
    torch.nn.init.zeros_(norm.weight)
    passes = bool(norm(torch.ones(1, 4)).abs().sum() > 0)
    assert passes == (model_type in GAIN_PLUS_ONE) == adds_one(model_type)
    # The initial weights say the same: a norm starts by changing no scale.
    assert passes == bool((norm_class(4).weight == 0).all())


def test_a_norm_that_cannot_be_asked_says_nothing() -> None:
    class Weightless(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

    assert class_adds_one(torch.nn.Linear) is None
    assert class_adds_one(Weightless) is None
    assert adds_one("a_type_of_nobody") is False


def test_the_norm_of_a_model_in_process_decides_not_its_type() -> None:
    """A model whose code is not that of its type in transformers (pitfall 2)."""
    model = random_model("llama")
    model.model.norm = Gemma2RMSNorm(SIZES["hidden_size"], eps=1e-3)
    torch.nn.init.uniform_(model.model.norm.weight)
    state, logits = last_state_and_logits(model)
    weights = VerifierWeights.from_model(model)
    assert weights.plus_one
    torch.testing.assert_close(logits_from(weights, state), logits, atol=1e-4, rtol=1e-4)
