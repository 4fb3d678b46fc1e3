"""Directories of verifiers and drafts as a user has them, small enough to be made and served in a second.

Verifiers have tokenizers. Each directory is made once, when it is first asked for.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from speculators.formats.verifier_weights import load_verifier_weights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from tests.models.drafts import randomize
from tests.runtime.test_native_drafts import block_for, save, verifier_of
from tests.tiny_models import SENTENCES, make_tokenizer
from tests.verifier_configs import EXPERTS, SIZES

KINDS = ("dense", "mixture of experts", "sliding window", "tied embeddings")
# A verifier of three tokens, whose law can be enumerated, and one whose checkpoint has an MTP block.
SMALL, NATIVE = "three tokens", "with an MTP block"
# One whose assistants read its keys.
GEMMA, SMALL_GEMMA = "gemma 4", "gemma 4 of three tokens"
# With as many layers as guides name.
DEEP = "36 layers"
WIDE = 0.25
# What is chosen of each family; drafts of a fixed size have seven tokens.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {},
    "peagle": {"num_layers": 2},
    "dflash": {"block_size": 8, "num_layers": 2},
    "dflash2": {"block_size": 8, "num_layers": 2, "draft_vocab_size": None, "selector_rank": 8, "selector_top_k": 3},
    "dspark": {"block_size": 7, "num_layers": 2, "markov_rank": 6},
    "mtp": {},
    "medusa": {"num_heads": 7},
    "mlp_speculator": {"n_predict": 7},
}
# For verifiers of a usual size: a full vocabulary times the verifier's width, for each token, would fill the memory.
SMALLER: Mapping[str, dict[str, Any]] = {"mlp_speculator": {"inner_dim": 64}}
DRAFT_VOCAB = 100


def configured(kind: str, vocab_size: int) -> PreTrainedConfig:
    """The configuration of a verifier of this kind."""
    sizes = {**SIZES, "vocab_size": vocab_size, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1}
    if kind == SMALL:
        return LlamaConfig(**{**sizes, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    if kind == DEEP:
        return LlamaConfig(**{**sizes, "num_hidden_layers": 36})
    if kind == GEMMA:
        return gemma4_config(vocab_size)
    if kind == SMALL_GEMMA:
        return gemma4_config(vocab_size, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if kind == "mixture of experts":
        return Qwen3MoeConfig(**sizes, **EXPERTS, num_experts=4)
    if kind == "sliding window":
        return Gemma3TextConfig(**sizes, sliding_window=4)
    return LlamaConfig(**sizes, tie_word_embeddings=kind == "tied embeddings")


def gemma4_config(vocab_size: int, **changes: Any) -> Gemma4TextConfig:
    """Windows of 4 in two of three layers, heads of two sizes, and two last layers without keys of their own."""
    sizes = {
        **SIZES,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "sliding_window": 4,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": vocab_size,
        "final_logit_softcapping": 30.0,
    }
    return Gemma4TextConfig(**sizes | changes)


def assistant_config(verifier: Gemma4TextConfig, *, ordered: bool = False, **changes: Any) -> Gemma4AssistantConfig:
    """Four layers of half the verifier's width; with `ordered` embeddings, a quarter of the tokens has logits."""
    text = {
        "vocab_size": verifier.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 4,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "attention_k_eq_v": verifier.attention_k_eq_v,
        "num_global_key_value_heads": verifier.per_layer_config[2].num_key_value_heads,
    }
    keys = {key: changes.pop(key) for key in list(changes) if key in text}
    groups = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2} if ordered else {}
    options = {"backbone_hidden_size": verifier.hidden_size, **groups, **changes}
    return Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text | keys), **options)


def save_assistant(directory: Path, config: Gemma4AssistantConfig, *, seed: int = 5) -> Path:
    """Save a random float32 assistant."""
    model = Gemma4AssistantForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if "norm" in name else WIDE * drawn)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    model.save_pretrained(directory)
    return directory


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` words: w0, w1, .."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges and ids are others than those of `make_tokenizer`; it has an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES[1::2] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def save_model(
    directory: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    noise: float = 0.0,
    **keys: Any,
) -> Path:
    """Save a random float32 model; with `noise`, the model of the same seed with that much noise on every weight.

    `keys` are added to its config.json.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if "norm" in name else WIDE * drawn)
            if noise:
                parameter.add_(noise * torch.randn(parameter.shape, generator=other))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | keys), encoding="utf-8")
    return directory


def shortened(directory: Path, model: str, layers: int = 4) -> str:
    """The first layers of a model, its embeddings and its head: a draft that agrees with it now and then."""
    shortening = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    shortening.model.layers = shortening.model.layers[:layers]
    shortening.config.num_hidden_layers = layers
    shortening.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return str(directory)


class Directories:
    """Verifiers by kind, and drafts by family (or kind of draft model) and by the kind of verifier they are for.

    `given` are folders of verifiers that exist already, by a name that is their kind; they have attention everywhere.
    """

    def __init__(self, root: Path, given: Mapping[str, str] | None = None) -> None:
        self.root, self.given = root, dict(given or {})

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Of every verifier with text."""
        return make_tokenizer()

    def verifier(self, kind: str = "dense") -> str:
        """A verifier of one of `KINDS`, of the other kinds above, or one that was given."""
        if kind in self.given:
            return self.given[kind]
        path = self._path("verifier", kind)
        if path.exists():
            return str(path)
        if kind == NATIVE:
            verifier = verifier_of("glm")
            save(path, verifier, "glm", block_for(verifier, "glm"))
            word_tokenizer(verifier.vocab_size).save_pretrained(path)
        else:
            tokenizer = word_tokenizer(3) if kind in (SMALL, SMALL_GEMMA) else self.tokenizer
            save_model(path, configured(kind, len(tokenizer)), tokenizer)
        return str(path)

    def speculator(self, family: str, kind: str = "dense", **options: Any) -> str:
        """An untrained speculator whose answers differ from prompt to prompt."""
        path = self._path(family, kind, *(f"{name}-{value}" for name, value in options.items()))
        if path.exists():
            return str(path)
        verifier = Path(self.verifier(kind))
        config = json.loads((verifier / "config.json").read_text(encoding="utf-8"))
        shape = VerifierShape.from_config_dict(config, str(verifier))
        small = SMALLER.get(family, {}) if kind in self.given else {}
        choices, chosen = FAMILIES[family].draft, {**OPTIONS[family], **small, **options}
        if "aux_layer_ids" in choices.model_fields:
            chosen.setdefault("aux_layer_ids", [1, 2, 3])
        if "draft_vocab_size" in choices.model_fields and kind != SMALL:
            chosen.setdefault("draft_vocab_size", DRAFT_VOCAB)
        resolved = choices(**chosen).resolve(shape)
        vocab = None
        if resolved.num_draft_ids < shape.vocab_size:
            vocab = DraftVocab.from_ids(range(0, 3 * resolved.num_draft_ids, 3), shape.vocab_size)
        speculator = Speculator.create(resolved, load_verifier_weights(verifier), vocab, seed=3)
        randomize(speculator, 3, 0.1)
        speculator.save_pretrained(path, torch.float32)
        return str(path)

    def assistant(self, kind: str = GEMMA, *, ordered: bool = True) -> str:
        """What reads the keys of the verifier of `GEMMA`, or of `SMALL_GEMMA`, whose tokens are too few to group."""
        path = self._path("assistant", kind, str(ordered))
        if not path.exists():
            config = Gemma4TextConfig.from_pretrained(self.verifier(kind))
            save_assistant(path, assistant_config(config, ordered=ordered and kind == GEMMA))
        return str(path)

    def draft_model(self, style: str = "near", kind: str = "dense") -> str:
        """A language model that drafts: "near" the verifier, "parallel" (PARD), or of "another vocabulary"."""
        path = self._path(f"draft-{style}", kind)
        if path.exists():
            return str(path)
        if kind in self.given and style == "near":
            return shortened(path, self.given[kind])
        tokenizer = word_tokenizer(3) if kind == SMALL else self.tokenizer
        if kind in self.given:
            tokenizer = AutoTokenizer.from_pretrained(self.given[kind])
        if style == "another vocabulary":
            tokenizer = other_tokenizer() if kind != SMALL else word_tokenizer(3)
        keys = {"pard_token": len(tokenizer) - 1} if style == "parallel" else {}
        same = style == "near" and kind != SMALL
        config = configured(kind if same or kind == SMALL else "dense", len(tokenizer))
        save_model(path, config, tokenizer, seed=0 if same else 7, noise=0.02 if same else 0.0, **keys)
        return str(path)

    def _path(self, *words: str) -> Path:
        return self.root / "-".join(words).replace(" ", "_").replace("/", "_")[:150]
