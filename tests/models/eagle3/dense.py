"""EAGLE-3 training written out slot by slot, from the formulas: the dense twin of model and objective.

Every document by itself, every position at every step, whole rows of logits; nothing is shared with the package but the
checkpoint's tensor names.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x_TND: Tensor, positions_T: Tensor, base: float) -> Tensor:
    size = x_TND.shape[-1]
    angles = positions_T[:, None].float() / base ** (torch.arange(0, size, 2).float() / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_TND[..., : size // 2], x_TND[..., size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class DenseDraft:
    """The network on one document; parameters are looked up by their checkpoint names."""

    def __init__(self, speculator: Speculator) -> None:
        self.config, self.layer = speculator.config, speculator.config.transformer_layer_config
        self.tensors = dict(speculator.draft.named_parameters())
        self.eps = self.layer.rms_norm_eps

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def features(self, aux: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            aux = self.norm("input_norm", aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.config.aux_layer_ids), -1)
            aux = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self.linear("fc", aux)

    def heads(self, name: str, x: Tensor, normed: str | None, positions: Tensor | None) -> Tensor:
        x = self.linear(name, x).unflatten(-1, (-1, self.layer.head_dim))
        if normed is not None and self.layer.model_type == "qwen3":
            x = self.norm(normed, x)
        return x if positions is None else rope(x, positions, self.layer.rope_parameters["rope_theta"])

    def attend(self, index: int, q: Tensor, memory: list[tuple[Tensor, Tensor]], length: int) -> Tensor:
        """`memory[0]` are the step-0 keys of the document, later entries those of each later step.

        The key of step j of a slot t lies at position t + j, as in serving, where windows go by position.
        """
        sliding = self.layer.layer_types[index] == "sliding_attention"
        step = len(memory) - 1
        window = self.layer.sliding_window if sliding else length + step
        repeat = q.shape[1] // memory[0][0].shape[1]
        out = torch.zeros_like(q)
        for t in range(length):
            places = [(0, j) for j in range(t + 1)] + [(j, t) for j in range(1, step + 1)]
            seen = [(j, slot) for j, slot in places if j + slot > t + step - window]
            keys = [memory[j][0][slot] for j, slot in seen]
            values = [memory[j][1][slot] for j, slot in seen]
            for head in range(q.shape[1]):
                scores = torch.stack([(q[t, head] * key[head // repeat]).sum() for key in keys]) * q.shape[-1] ** -0.5
                out[t, head] = scores.softmax(0) @ torch.stack([value[head // repeat] for value in values])
        return out

    def decode(
        self, index: int, embeds: Tensor, hidden: Tensor, positions: Tensor, memory: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One layer over all positions [T]; adds this step's keys and values to what it attends to."""
        name, attention = f"layers.{index}", f"layers.{index}.self_attn"
        if index == 0:
            state = self.norm(f"{name}.hidden_norm", hidden)
            residual = state if self.config.norm_before_residual else hidden
            state = torch.cat((self.norm(f"{name}.input_layernorm", embeds), state), -1)
        else:
            residual, state = hidden, self.norm(f"{name}.input_layernorm", hidden)
        q = self.heads(f"{attention}.q_proj", state, f"{attention}.q_norm", positions)
        k = self.heads(f"{attention}.k_proj", state, f"{attention}.k_norm", positions)
        memory.append((k, self.heads(f"{attention}.v_proj", state, None, None)))
        attended = self.attend(index, q, memory, len(positions)).flatten(1)
        hidden = residual + self.linear(f"{attention}.o_proj", attended)
        state = self.norm(f"{name}.post_attention_layernorm", hidden)
        gated = F.silu(self.linear(f"{name}.mlp.gate_proj", state)) * self.linear(f"{name}.mlp.up_proj", state)
        return hidden + self.linear(f"{name}.mlp.down_proj", gated)

    def unroll(self, aux: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """Logits [T, D] of every step; row t of step k is only meaningful where tokens[t + 1 + k] exists."""
        length = len(tokens) - 1
        hidden, logits = self.features(aux[:length]), []
        memory: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layer.num_hidden_layers)]
        for step in range(steps):
            shifted = torch.cat((tokens, tokens.new_zeros(steps)))[1 + step : 1 + step + length]
            embeds = self.tensors["embed_tokens.weight"][shifted]
            positions = torch.arange(length) + step
            for index in range(self.layer.num_hidden_layers):
                hidden = self.decode(index, embeds, hidden, positions, memory[index])
            normed = self.norm("norm", hidden)
            logits.append(self.linear("lm_head", normed))
            hidden = normed if self.config.norm_output else hidden
        return logits


def dense_loss(
    speculator: Speculator, batch: PackedBatch, head: VerifierHead, *, steps: int, decay: float
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """KL loss and counts; a prediction counts where its label is supervised and in the same document."""
    draft, ids = DenseDraft(speculator), speculator.draft.verifier_ids_D
    losses: list[list[Tensor]] = [[] for _ in range(steps)]
    counts = {f"{kind}_{k}": [0, 0] for kind in ("full_acc", "cond_acc") for k in range(steps)}
    for number in range(int(batch.document_ids.max()) + 1):
        chosen = batch.document_ids == number
        tokens, mask = batch.input_ids[chosen], batch.loss_mask[chosen].tolist()
        teacher = head.logits(batch.last_hidden_states[chosen])
        teacher = teacher if ids is None else teacher[:, ids]
        logits = draft.unroll(batch.aux_hidden_states[chosen], tokens, steps)
        for t in range(len(tokens) - 1):
            right = known = True
            for k in range(steps):
                label = t + 2 + k
                if label >= len(tokens) or not mask[label]:
                    known = False
                    continue
                log_p, log_q = teacher[label - 1].log_softmax(0), logits[k][t].log_softmax(0)
                losses[k].append((log_p.exp() * (log_p - log_q)).sum())
                counts[f"cond_acc_{k}"][1] += right and known
                right = right and bool(log_q.argmax() == log_p.argmax())
                counts[f"full_acc_{k}"][1] += known
                for kind in ("full_acc", "cond_acc"):
                    counts[f"{kind}_{k}"][0] += right and known
    total = sum(decay**k * sum(rows, torch.zeros(())) for k, rows in enumerate(losses))
    return total / max(len(losses[0]), 1), {name: (a, b) for name, (a, b) in counts.items()}
