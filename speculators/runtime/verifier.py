"""The verifier in process: a transformers causal LM that writes into a slot cache and shows its hidden states."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from speculators.errors import VerifierError
from speculators.models.attention_interface import ATTENTION_NAME, SlotKeyValues, branching, writing
from speculators.models.branches import Branches
from speculators.models.cache import SlotCache, SlotWrite
from speculators.models.hardware import multiplies_bfloat16, padded_rows
from speculators.models.layers import use_skinny_linears
from speculators.models.packed import pack_linears
from speculators.models.slot_states import RECURRENCES, kept_states, use_slot_states
from speculators.runtime.description import has_static_rotation

# Kinds of layers that carry a state from token to token beside, or instead of, keys and values.
_RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"})
# What models call the norm behind their last layer.
_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")
_NORMED = -1  # where the states after the final norm are kept among the captured ones
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass
class VerifierOutput:
    """One forward pass.

    `logits_BTV` (None when not asked for), `aux_BTX` the aux states concatenated in ascending layer order, `normed_BTH`
    the last residual stream after the final norm.
    """

    logits_BTV: Tensor | None
    aux_BTX: Tensor | None
    normed_BTH: Tensor


class _Captured(threading.local):
    """States of the pass that runs in a thread: hooks keep those of the `wanted` ids in `states`."""

    def __init__(self) -> None:
        self.wanted: Sequence[int] = ()
        self.states: dict[int, Tensor] = {}

    @contextmanager
    def of(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """What a pass inside leaves behind, by layer id."""
        self.wanted, self.states = layer_ids, {}
        try:
            yield self.states
        finally:
            self.wanted, self.states = (), {}


class Verifier:
    """A causal LM whose output distribution speculation preserves, with its tokenizer.

    Layer ids are capture ids: id i is the residual stream entering decoder layer i (0 = embeddings), id L the output of
    the last layer before the final norm.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, name_or_path: str = "verifier"
    ) -> None:
        self.name_or_path = name_or_path
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config: PretrainedConfig = model.config.get_text_config()
        _require_known_states(model, self.config, name_or_path)
        self._layers, self._norm, self._decoder = _find_decoder(model)
        use_slot_states(self._layers, self.config)
        self._captured = _Captured()
        modules = [*self._layers, self._norm]
        for layer_id, module in enumerate(modules):
            module.register_forward_pre_hook(self._catch(layer_id), with_kwargs=True)
        self._norm.register_forward_hook(self._catch_normed)
        self.aux_layer_ids: tuple[int, ...] = ()
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        if model.device.type == "cpu":
            use_skinny_linears(model)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tokenizer: str | None = None,
    ) -> Verifier:
        """Load a verifier from a local folder or a hub id.

        `dtype` "auto" is the checkpoint's own, but float32 on a CPU without bf16 instructions, where bf16 products are
        several times slower. Raises VerifierError when config, weights or tokenizer cannot be read, or a tensor of the
        model is missing.
        """
        name = str(name_or_path)
        target = torch.device(device) if device is not None else default_device()
        transformers_logging.disable_progress_bar()
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(name, **options)
            wanted = resolve_dtype(dtype, config, target)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=wanted,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                **options,
            )
            tokens = AutoTokenizer.from_pretrained(tokenizer or name, **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise VerifierError(
                f"verifier {name!r} cannot be read: {error}. Give a local folder with config.json, safetensors and a "
                "tokenizer, or a hub id."
            ) from error
        model, loading = loaded
        missing = sorted(loading["missing_keys"])
        if missing:
            raise VerifierError(
                f"verifier {name!r} lacks {len(missing)} of its tensors: {', '.join(missing[:5])}; they would be "
                "random numbers. Fetch the checkpoint again, or give the one that its config.json belongs to."
            )
        return cls(model.to(target), tokens, name_or_path=name)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, L."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, H."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head (may exceed the tokenizer's length)."""
        return int(self.config.vocab_size)

    @property
    def max_length(self) -> int | None:
        """Longest sequence the positions were made for, None when the config does not say."""
        length = getattr(self.config, "max_position_embeddings", None)
        return None if length is None else int(length)

    @property
    def reentrant(self) -> bool:
        """Whether passes may run in several threads: not where a pass changes the rotation, as `dynamic` rope does."""
        return has_static_rotation(self.config)

    @property
    def packs(self) -> bool:
        """Whether a pass over rows of unequal lengths takes what its tokens take, but for attention.

        Not where layers have a running state, which read their rows side by side.
        """
        return not kept_states(self.config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: the generation config's, else the model's, and the tokenizer's."""
        found: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                found.update([ids] if isinstance(ids, int) else ids)
                break
        tokenizer_eos = getattr(self.tokenizer, "eos_token_id", None)
        if isinstance(tokenizer_eos, int):
            found.add(tokenizer_eos)
        return frozenset(found)

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty slot cache of this model's layers."""
        return SlotCache(self.num_layers, num_slots, dtype=self.dtype, device=self.device)

    def set_aux_layers(self, layer_ids: Sequence[int]) -> None:
        """Choose the capture ids whose states `forward` returns; they are sorted and made unique."""
        self.aux_layer_ids = self._checked_ids(layer_ids)

    def _checked_ids(self, layer_ids: Sequence[int]) -> tuple[int, ...]:
        ids = tuple(sorted(set(layer_ids)))
        if ids and not 0 <= ids[0] <= ids[-1] <= self.num_layers:
            raise VerifierError(
                f"layer ids {list(layer_ids)} are outside 0..{self.num_layers} of verifier {self.name_or_path!r} "
                f"({self.num_layers} layers; id i is the input of layer i, id {self.num_layers} the last output)"
            )
        return ids

    def _catch(self, layer_id: int) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def hook(_: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
            if layer_id in self._captured.wanted:
                self._captured.states[layer_id] = inputs[0] if inputs else options["hidden_states"]

        return hook

    def _catch_normed(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        self._captured.states[_NORMED] = output

    @torch.no_grad()
    def forward(
        self, token_ids_BT: Tensor, cache: SlotCache, write: SlotWrite, *, need_logits: bool = True
    ) -> VerifierOutput:
        """Run tokens at the positions of `write`, whose keys and values go into `cache`.

        `token_ids_BT` is int64, right-padded; what padding computes is never seen by a valid query, because it lies at
        later positions, and is overwritten by the next write there. Nor does a layer's running state read it.
        """
        if self.packs:
            write = write.without_padding()
        options = {
            "input_ids": write.pack(token_ids_BT),
            "position_ids": write.pack(write.positions_BT),
            "attention_mask": self._no_mask(),
            self._cache_argument: SlotKeyValues(cache, write),
            "use_cache": True,
        }
        with writing(write), self._captured.of(self.aux_layer_ids) as captured:
            output = (self.model if need_logits else self._decoder)(**options)
        aux = torch.cat([captured[i] for i in self.aux_layer_ids], -1) if self.aux_layer_ids else None
        return VerifierOutput(
            write.unpack(output.logits) if need_logits else None,
            None if aux is None else write.unpack(aux),
            write.unpack(captured[_NORMED]),
        )

    def capture(self, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[Tensor]:
        """Hidden states of whole sequences, without a cache or padding; what all begin with is computed once.

        Returns one tensor [T, len(ids), H] a sequence in the verifier's dtype, ids ascending. Where the verifier is
        `reentrant`, several threads may call it at once.
        """
        if not token_ids or min(len(row) for row in token_ids) == 0:
            raise VerifierError("capture needs at least one sequence, each of at least one token")
        branches, tokens = Branches.of(
            token_ids, partial(padded_rows, dtype=self.dtype, device=self.device, multiple=32)
        )
        ids = self._checked_ids(layer_ids)
        with torch.inference_mode(), branching(branches), self._captured.of(ids) as captured:
            self._decoder(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=branches.positions(self.device),
                attention_mask=self._no_mask(),
                use_cache=False,
            )
            states_TAH = torch.stack([captured[i][0] for i in ids], 1)
        # Copies that are made here may be trained on, those of inference mode may not.
        return branches.whole(states_TAH)

    def pack_weights(self, most_bytes: int) -> bool:
        """Make captures of long rows faster on a CPU by a copy of the decoder's weights in the processor's own order.

        False where that does not apply, or where it would take more than `most_bytes`.
        """
        return pack_linears(self._decoder, most_bytes)

    def _no_mask(self) -> Tensor:
        """What keeps transformers from making masks of its own, which ours replace."""
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)


def _find_decoder(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module, nn.Module]:
    for decoder in (getattr(model, "model", None), model.get_decoder(), getattr(model, "language_model", None)):
        inner = getattr(decoder, "language_model", decoder)
        layers = getattr(inner, "layers", None)
        norm = next((getattr(inner, name) for name in _NORMS if hasattr(inner, name)), None)
        if isinstance(layers, nn.ModuleList) and isinstance(norm, nn.Module) and isinstance(inner, nn.Module):
            return layers, norm, inner
    raise VerifierError(
        f"{type(model).__name__} has no decoder with `layers` and a final norm ({', '.join(_NORMS)}), so its states "
        "cannot be captured"
    )


def _require_known_states(model: PreTrainedModel, config: PretrainedConfig, name: str) -> None:
    """Refuse layers that carry a state from token to token which this engine cannot take back."""
    kept = kept_states(config)
    unknown = sorted((set(getattr(config, "layer_types", None) or ()) & _RECURRENT_LAYERS) - kept)
    # Some with a state of another kind say so by their class alone.
    stateful = model._is_stateful and not kept
    if unknown or stateful:
        raise VerifierError(
            f"verifier {name!r} ({config.model_type}) has {', '.join(unknown) or 'recurrent'} layers, whose running "
            "state this engine cannot take back when a draft is rejected; serve it with vLLM, or choose one with "
            f"attention everywhere, or one of {', '.join(sorted(RECURRENCES))}"
        )


def default_device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in; VerifierError for a name that is not known."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise VerifierError(f"dtype {dtype!r} is not known; expected auto or one of {', '.join(sorted(DTYPES))}")
        return DTYPES[dtype]
    stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
    if device.type == "cpu" and not multiplies_bfloat16(device):
        return torch.float32
    return stored if isinstance(stored, torch.dtype) else DTYPES[str(stored)]
