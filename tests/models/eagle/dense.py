"""EAGLE drafting and training written out from the formulas: the dense twin of model and objective.

Every start of every document by itself, the whole sequence anew for every drafted token, one query at a time; nothing
is shared with the package but the checkpoint's tensor names.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x_TND: Tensor, base: float) -> Tensor:
    length, _, size = x_TND.shape
    angles = torch.arange(length)[:, None].float() / base ** (torch.arange(0, size, 2).float() / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_TND[..., : size // 2], x_TND[..., size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class DenseDraft:
    """The network on one sequence; parameters are looked up by their checkpoint names, and absent ones left out."""

    def __init__(self, speculator: Speculator) -> None:
        self.config = speculator.config
        self.tensors = dict(speculator.draft.named_parameters())

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors.get(f"{name}.weight")
        return x if weight is None else rms(x, weight, self.config.rms_norm_eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def attention(self, name: str, x: Tensor) -> Tensor:
        base, size = self.config.rope_parameters["rope_theta"], self.config.head_dim
        q, k, v = (self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, size)) for part in "qkv")
        q, k, repeat = rope(q, base), rope(k, base), q.shape[1] // k.shape[1]
        rows = []
        for t in range(len(x)):
            heads = []
            for head in range(q.shape[1]):
                scores = k[: t + 1, head // repeat] @ q[t, head] * size**-0.5
                heads.append(scores.softmax(0) @ v[: t + 1, head // repeat])
            rows.append(torch.cat(heads))
        return self.linear(f"{name}.o_proj", torch.stack(rows))

    def outputs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """States [T, H] beside the tokens after them [T] -> what the verifier's head reads, [T, H]."""
        embeds = self.norm("embed_layernorm", self.tensors["embed_tokens.weight"][tokens])
        hidden = self.linear("fc", torch.cat((embeds, features), -1))
        for index in range(self.config.num_hidden_layers):
            name = f"layers.{index}"
            hidden = hidden + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", hidden))
            state = self.norm(f"{name}.post_attention_layernorm", hidden)
            gated = F.silu(self.linear(f"{name}.mlp.gate_proj", state)) * self.linear(f"{name}.mlp.up_proj", state)
            hidden = hidden + self.linear(f"{name}.mlp.down_proj", gated)
        return self.norm("post_embedding_layernorm", hidden)

    def drafted(self, features: Tensor, tokens: Tensor, start: int, steps: int) -> list[Tensor]:
        """What drafting from the verified positions 0..start makes at each step, given the true tokens; [H] each."""
        states, found = features[: start + 1], []
        for step in range(steps):
            if start + step + 1 >= len(tokens):
                break
            found.append(self.outputs(states, tokens[1 : start + step + 2])[-1])
            states = torch.cat((states, found[-1].detach()[None]))
        return found


def smooth_l1(x: Tensor, y: Tensor) -> Tensor:
    distance = (x - y).abs()
    return torch.where(distance < 1, distance.pow(2) / 2, distance - 0.5).mean()


def dense_loss(
    speculator: Speculator,
    batch: PackedBatch,
    head: VerifierHead,
    *,
    steps: int = 1,
    token_weight: float = 0.1,
    top_weight: float = 0.0,
    noise: list[Tensor] | None = None,
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Loss and counts; a prediction counts where the token it is about is supervised and in the same document.

    `noise[d]` [T, H] is added to the features of document d, not to the targets.
    """
    draft = DenseDraft(speculator)
    losses: list[list[Tensor]] = [[] for _ in range(steps)]
    counts = {f"{kind}_{k}": [0, 0] for kind in ("full_acc", "cond_acc") for k in range(steps)}
    for number in range(int(batch.document_ids.max()) + 1):
        chosen = batch.document_ids == number
        tokens, mask = batch.input_ids[chosen], batch.loss_mask[chosen].tolist()
        states = rms(batch.last_hidden_states[chosen], head.norm_weight, head.norm_eps)
        features = states if noise is None else states + noise[number]
        for t in range(len(tokens) - 1):
            right = known = True
            for k, state in enumerate(draft.drafted(features, tokens, t, steps)):
                label = t + 2 + k
                if label >= len(tokens) or not mask[label]:
                    known = False
                    continue
                target = states[label - 1]
                p, log_q = (head.head.weight @ target).softmax(0), (head.head.weight @ state).log_softmax(0)
                top = p.argsort(descending=True)[:10]
                entropies = token_weight * -(p * log_q).sum() + top_weight * -(p[top] * log_q[top]).sum()
                losses[k].append(smooth_l1(state, target) + entropies)
                counts[f"cond_acc_{k}"][1] += right and known
                right = right and bool(log_q.argmax() == p.argmax())
                counts[f"full_acc_{k}"][1] += known
                for kind in ("full_acc", "cond_acc"):
                    counts[f"{kind}_{k}"][0] += right and known
    total = sum((sum(rows, torch.zeros(())) for rows in losses), torch.zeros(()))
    return total / (len(losses[0]) + 1e-5), {name: (a, b) for name, (a, b) in counts.items()}
