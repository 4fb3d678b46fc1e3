"""An MTP block by hand around the decoder layer of a whole verifier of transformers: no cache, no packing.

Shape suffixes: T tokens of one document, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.mtp.verifiers import RAW

# vLLM's MTP models of these verifiers replace the embedding at position 0 by zeros.
ZERO_FIRST = ("deepseek_v3", "glm4_moe", "mimo")
# Which of the verifier's four layers the block is like.
LAYER = {"qwen3_next_dense": 2}
PREFIX = "mtp_layers.0."


class DenseBlock(nn.Module):
    """The block of one style, with the tensors of a draft's state dict."""

    def __init__(self, style: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        config = {key: value for key, value in RAW[style].items() if key not in ("quantization_config", "auto_map")}
        kind = config.pop("model_type")
        verifier: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen2" if kind == "mimo" else kind, **config), attn_implementation="eager"
        )
        self.layer = verifier.model.layers[LAYER.get(style, 3)].eval()
        self.rotary = verifier.model.rotary_emb
        self.eps = config["rms_norm_eps"]
        # A norm whose weight starts at 0 multiplies by 1 + weight.
        self.offset = 1.0 if not self.layer.input_layernorm.weight.detach().any() else 0.0
        self.zero_first = kind in ZERO_FIRST
        # Only where every layer of the verifier has one.
        self.window = config["sliding_window"] if config.get("max_window_layers") == 0 else None
        inner = {
            name.removeprefix(PREFIX): tensor.clone() for name, tensor in tensors.items() if name.startswith(PREFIX)
        }
        self.around = nn.ParameterDict(
            {
                name: nn.Parameter(inner.pop(f"{name}.weight"))
                for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            }
        )
        self.layer.load_state_dict(inner, strict=True)
        self.embed_tokens, self.lm_head = tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    def norm(self, name: str, hidden_TH: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * gain."""
        deviation = (hidden_TH.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return hidden_TH / deviation * (self.around[name] + self.offset)

    def forward(self, token_ids_T: Tensor, states_TH: Tensor) -> Tensor:
        """Tokens and states of positions 0..T-1 -> the normed output [T, H]."""
        embeds_TH = self.embed_tokens[token_ids_T]
        if self.zero_first:
            embeds_TH = embeds_TH * (torch.arange(len(token_ids_T)) > 0)[:, None]
        joined = torch.cat((self.norm("token_layernorm", embeds_TH), self.norm("hidden_layernorm", states_TH)), -1)
        inputs = (joined @ self.around["input_proj"].T)[None]
        positions = torch.arange(len(token_ids_T))[None]
        unseen = torch.ones(len(token_ids_T), len(token_ids_T), dtype=torch.bool).triu(1)
        if self.window is not None:
            unseen |= torch.ones_like(unseen).tril(-self.window)
        mask = torch.zeros(unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)[None, None]
        out = self.layer(
            inputs, position_embeddings=self.rotary(inputs, positions), position_ids=positions, attention_mask=mask
        )
        return self.norm("final_layernorm", out[0])

    def steps(self, token_ids_T: Tensor, states_TH: Tensor, num_steps: int) -> list[Tensor]:
        """FastMTP on one document: per step the states [T - num_steps - 1, H] that the head reads."""
        length, found = len(token_ids_T) - num_steps - 1, []
        hidden = states_TH[:length]
        for step in range(num_steps):
            hidden = self(token_ids_T[step + 1 : step + 1 + length], hidden)
            found.append(hidden)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by the draft's names."""
        around = {f"{PREFIX}{name}.weight": parameter.grad for name, parameter in self.around.items()}
        inner = {f"{PREFIX}{name}": parameter.grad for name, parameter in self.layer.named_parameters()}
        return around | inner
