"""The three tensors that a draft takes from its verifier: input embedding, output head and final norm.

They are found by exact names, never by how a name ends: a multimodal model has several tensors called `norm.weight`.
Only these tensors are read, from whichever file holds them. Shape suffixes: V vocabulary, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from speculators.errors import FormatError, VerifierError
from speculators.formats.checkpoint import read_config, read_present_headers, text_config
from speculators.formats.norm_gain import adds_one, class_adds_one

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.embeddings.weight",
    "backbone.embeddings.weight",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight")
NORM_NAMES = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
    "model.embedding_norm.weight",
    "model.final_layernorm.weight",
    "model.norm_f.weight",
    "backbone.norm_f.weight",
)
# What configurations call the epsilon of the final norm; the first that is there counts.
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


@dataclass(frozen=True)
class VerifierWeights:
    """Input embedding and head [V, H], final norm [H], all in the verifier's dtype; a tied head is the embedding.

    `plus_one` says that the norm multiplies by `1 + final_norm`. The verifier's logits are
    `scale * (hidden @ lm_head.T)`, then `softcap * tanh(logits / softcap)` where `softcap` is set.
    """

    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    norm_eps: float
    plus_one: bool = False
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> VerifierWeights:
        """Take the tensors (not copies) of a transformers model in process; VerifierError as for a directory."""
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
        source = str(model.config.name_or_path)
        weights = _assemble(model.config.to_dict(), tensors, tensors.__getitem__, source)
        norm_name = _only(NORM_NAMES, tensors, "final norm", source)
        plus_one = class_adds_one(type(model.get_submodule(norm_name.removesuffix(".weight"))))
        return weights if plus_one is None else replace(weights, plus_one=plus_one)


def load_verifier_weights(path: str | os.PathLike[str]) -> VerifierWeights:
    """Read a verifier's embedding, head and final norm from a local directory of safetensors files.

    Files that the index names and that hold none of the three may be absent. VerifierError where the directory or a
    tensor is missing, where two tensors could be meant, where shapes disagree or where the weights are quantised.
    """
    directory = Path(path)
    try:
        config, tensors = read_config(directory), VerifierTensors(directory)
    except FormatError as error:
        hint = "expected a causal language model as config.json and safetensors files"
        raise VerifierError(f"verifier {directory}: {error}; {hint}") from error
    return _assemble(config, dict.fromkeys(tensors.names), tensors.read, str(directory))


class VerifierTensors:
    """The tensors of a verifier's directory by name, read one by one; files of others may be absent.

    FormatError where there are no safetensors files, or a damaged one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._headers, self._absent = read_present_headers(directory)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, those of absent files among them."""
        return [*self._headers, *self._absent]

    @property
    def is_whole(self) -> bool:
        """Whether every file that the index names is there."""
        return not self._absent

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as stored; VerifierError where its file is absent or cannot be read."""
        if name in self._absent:
            raise VerifierError(
                f"verifier {self._directory}: {self._absent[name].name}, which has {name}, is missing; fetch it"
            )
        try:
            with safe_open(self._headers[name].file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise VerifierError(f"verifier {self._directory}: {name} cannot be read: {error}") from error
        return tensor


def _assemble(
    config: Mapping[str, Any], names: Mapping[str, object], read: Callable[[str], torch.Tensor], source: str
) -> VerifierWeights:
    text = text_config(config)
    embedding_name = _only(EMBEDDING_NAMES, names, "input embedding", source)
    norm_name = _only(NORM_NAMES, names, "final norm", source)
    biases = [name.removesuffix("weight") + "bias" for name in (*HEAD_NAMES, *NORM_NAMES)]
    for name in (name for name in biases if name in names):
        raise VerifierError(f"verifier {source}: it has {name}; expected an RMSNorm and a head without biases")
    embedding, norm = read(embedding_name), read(norm_name)
    head = _head(config, embedding, names, read, source)
    for name, tensor, wanted in (
        (embedding_name, embedding, 2),
        ("the output head", head, 2),
        (norm_name, norm, 1),
    ):
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise VerifierError(
                f"verifier {source}: {name} is {tensor.dtype}; expected float weights, not quantised ones"
            )
        if tensor.dim() != wanted or tensor.shape[-1] != norm.shape[-1]:
            raise VerifierError(
                f"verifier {source}: {name} is {list(tensor.shape)}; the final norm is {list(norm.shape)}"
            )
    if head.shape != embedding.shape:
        raise VerifierError(
            f"verifier {source}: head {list(head.shape)}, embedding {list(embedding.shape)}; expected alike"
        )
    eps = next((found for name in _EPSILONS if (found := _number(text, name, source)) is not None), None)
    if eps is None:
        raise VerifierError(f"verifier {source}: no rms_norm_eps in its config; expected a final RMSNorm")
    divisor = _number(text, "logits_scaling", source)
    factor = _number(text, "logit_scale", source)
    return VerifierWeights(
        embedding,
        head,
        norm,
        norm_eps=eps,
        plus_one=adds_one(str(text.get("model_type"))),
        softcap=_number(text, "final_logit_softcapping", source),
        scale=(factor or 1.0) / (divisor or 1.0),
    )


def _only(candidates: tuple[str, ...], names: Mapping[str, object], what: str, source: str) -> str:
    found = [name for name in candidates if name in names]
    if not found:
        raise VerifierError(f"verifier {source}: no {what}; expected a tensor named {' or '.join(candidates)}")
    if len(found) > 1:
        raise VerifierError(f"verifier {source}: its {what} is ambiguous: {' and '.join(found)} are both there")
    return found[0]


def _head(
    config: Mapping[str, Any],
    embedding: torch.Tensor,
    names: Mapping[str, object],
    read: Callable[[str], torch.Tensor],
    source: str,
) -> torch.Tensor:
    """Return the output head; a tied one has no tensor of its own, or where it has, the config says that it is tied."""
    flags = [part["tie_word_embeddings"] for part in (config, text_config(config)) if "tie_word_embeddings" in part]
    wrong = next((flag for flag in flags if flag is not None and not isinstance(flag, bool)), None)
    if wrong is not None:
        raise VerifierError(f"verifier {source}: tie_word_embeddings is {wrong!r}; expected true or false")
    tied = flags[0] if len(set(flags)) == 1 else None
    if not any(name in names for name in HEAD_NAMES):
        if tied is False:
            raise VerifierError(f"verifier {source}: no lm_head.weight although tie_word_embeddings is false")
        return embedding
    head = read(_only(HEAD_NAMES, names, "output head", source))
    if tied is True:
        return embedding
    if tied is None and not torch.equal(head, embedding):
        hint = "set tie_word_embeddings in its config.json"
        raise VerifierError(f"verifier {source}: head and embedding differ and nothing says which is its head; {hint}")
    return head


def _number(config: Mapping[str, Any], key: str, source: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise VerifierError(f"verifier {source}: {key} is {value!r}; expected a number above 0")
    return float(value)
