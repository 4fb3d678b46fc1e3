"""What foreign checkpoints compute, by hand and in float32, from their own tensors under their own names.

Shape suffixes: T tokens, H hidden, V the tokens that a draft can propose.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import AutoConfig, AutoModelForCausalLM

from tests.convert.foreign import ForeignCheckpoint
from tests.convert.layouts_native import AROUND

# vLLM's MTP models of these verifiers replace the embedding at position 0 by zeros.
ZERO_FIRST = ("deepseek_v3", "glm4_moe", "mimo")
PLUS_ONE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def medusa(case: ForeignCheckpoint, state_H: Tensor, shared_VH: Tensor) -> list[Tensor]:
    """Each head's logits [V] over the verifier's ids; ids that are not proposed have -inf."""
    tensors = {_without_wrappers(name): tensor.float() for name, tensor in case.tensors.items()}
    token_map = case.tensors.get("token_map")
    layers = case.config.get("medusa_num_layers") or case.config["num_hidden_layers"]
    found: list[Tensor] = []
    while f"{len(found)}.0.linear.weight" in tensors:
        head, hidden = len(found), state_H
        for layer in range(layers):
            # Medusa's own code makes all layers of a head one module, of which a file may hold one copy.
            stored = layer if f"{head}.{layer}.linear.weight" in tensors else 0
            moved = tensors[f"{head}.{stored}.linear.weight"] @ hidden
            moved = moved + tensors.get(f"{head}.{stored}.linear.bias", torch.zeros(()))
            hidden = hidden + silu(moved)
        output = tensors.get(f"{head}.output", tensors.get("lm_head.weight", shared_VH))
        logits = output @ hidden
        if token_map is not None:
            logits = torch.full((len(shared_VH),), -math.inf).scatter(0, token_map.long(), logits)
        found.append(logits)
    return found


def _without_wrappers(name: str) -> str:
    """`0.1.linear.weight` of layer 1 in head 0, and `0.output` of the matrix behind its layers."""
    name = name.removeprefix("medusa_head.").removeprefix("medusa_heads.").removeprefix("parallel_draft_heads.")
    name = name.replace("medusa_layers.", "")
    if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(\w+)", name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    match = re.fullmatch(r"(\d+)\.\d+\.weight", name) or re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
    return name if match is None else f"{match[1]}.output"


def accelerator(case: ForeignCheckpoint, state_H: Tensor, token: int, steps: int) -> list[Tensor]:
    """Each step's logits [V], where the likeliest token of one is read by the next.

    s = P s + (e / w) E[token], s = gelu(norm(s)), with w = 0.5^(0.5/n) and e² = (1 - w²) inner / 2.
    """
    tensors = {name.removeprefix("speculator."): tensor for name, tensor in case.tensors.items()}
    config, found = case.config, []
    inner = config["inner_dim"] or config["emb_dim"]
    weight = 0.5 ** (0.5 / config["n_predict"])
    scale = math.sqrt((1 - weight**2) * inner / 2) / weight

    def of(name: str, step: int) -> Tensor:
        tied = config.get("tie_weights", False)
        return tensors[name.format(min(step, 1) if tied and "proj" in name else 0 if tied else step)]

    if config["scale_input"]:
        state_H = state_H / (state_H.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    for step in range(steps):
        state_H = of("proj.{}.weight", step) @ state_H + scale * of("emb.{}.weight", step)[token]
        normed = state_H / (state_H.square().mean() + 1e-6).sqrt()
        state_H = gelu(normed * of("ln.{}.weight", step) + of("ln.{}.bias", step))
        logits = of("head.{}.weight", step) @ state_H
        token = int(logits.argmax())
        found.append(logits)
    return found


class NativeBlock:
    """An MTP block around a decoder layer of the verifier's own class in transformers, from native tensors."""

    def __init__(self, case: ForeignCheckpoint) -> None:
        self.config = dict(case.config)
        self.tensors = {name: tensor.float() for name, tensor in _widened(case).items()}
        self.prefix = next(prefix for prefix in AROUND if f"{prefix}{AROUND[prefix][0]}.weight" in self.tensors)
        kind = self.config["model_type"]
        keys = {key: value for key, value in self.config.items() if key not in ("model_type", "quantization_config")}
        keys.pop("torch_dtype")
        verifier: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen2" if kind == "mimo" else kind, **keys), attn_implementation="eager"
        )
        self.layer = verifier.model.layers[3].eval()
        self.rotary = verifier.model.rotary_emb
        self.layer.load_state_dict(_of_layer(self.tensors, self.prefix + AROUND[self.prefix][4]), strict=True)

    def _around(self, place: int) -> Tensor:
        return self.tensors[f"{self.prefix}{AROUND[self.prefix][place]}.weight"]

    def _norm(self, place: int, hidden: Tensor) -> Tensor:
        gain = self._around(place) + (1.0 if self.config["model_type"] in PLUS_ONE else 0.0)
        return hidden / (hidden.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * gain

    @torch.no_grad()
    def logits(self, tokens_T: Tensor, states_TH: Tensor, steps: int) -> list[Tensor]:
        """Tokens behind the states, and each step's logits [V]; the likeliest token of one is read by the next."""
        found: list[Tensor] = []
        embeddings, head = self.tensors["model.embed_tokens.weight"], self.tensors["lm_head.weight"]
        for _ in range(steps):
            embeds_TH = embeddings[tokens_T]
            if self.config["model_type"] in ZERO_FIRST:
                embeds_TH = embeds_TH * (torch.arange(len(tokens_T)) > 0)[:, None]
            parts = [self._norm(1, embeds_TH), self._norm(2, states_TH)]
            if self.prefix == "model.mtp_layers.0.":
                parts.reverse()
            out_H = self._norm(3, self._attended(torch.cat(parts, -1) @ self._around(0).T))[-1]
            found.append(head @ out_H)
            tokens_T = torch.cat((tokens_T, found[-1].argmax()[None]))
            states_TH = torch.cat((states_TH, out_H[None]))
        return found

    def _attended(self, inputs_TH: Tensor) -> Tensor:
        count = len(inputs_TH)
        positions = torch.arange(count)[None]
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        mask = torch.zeros(future.shape).masked_fill(future, torch.finfo(torch.float32).min)[None, None]
        turns = self.rotary(inputs_TH[None], positions)
        out = self.layer(inputs_TH[None], position_embeddings=turns, position_ids=positions, attention_mask=mask)
        return out[0]


def _widened(case: ForeignCheckpoint) -> dict[str, Tensor]:
    """Float8 numbers times the scale of their block, spread over the block by a Kronecker product."""
    found = {}
    for name, tensor in case.tensors.items():
        scales = case.tensors.get(f"{name}_scale_inv")
        if scales is not None:
            block = torch.ones(case.config["quantization_config"]["weight_block_size"])
            spread = torch.kron(scales, block)[: tensor.shape[0], : tensor.shape[1]]
            tensor = tensor.float() * spread
        if not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def _of_layer(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A layer's tensors by transformers' names, which have experts side by side."""
    parts = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    inner = {name: tensor for name, tensor in inner.items() if name.startswith(parts)}
    count = sum(bool(re.fullmatch(r"mlp\.experts\.\d+\.up_proj\.weight", name)) for name in inner)
    if not count:
        return inner
    one = {
        kind: [inner.pop(f"mlp.experts.{index}.{kind}_proj.weight") for index in range(count)]
        for kind in ("gate", "up", "down")
    }
    pairs = [torch.cat(pair) for pair in zip(one["gate"], one["up"], strict=True)]
    inner["mlp.experts.gate_up_proj"], inner["mlp.experts.down_proj"] = torch.stack(pairs), torch.stack(one["down"])
    return inner
