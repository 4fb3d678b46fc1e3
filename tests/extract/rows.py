"""Prepared rows and what a store of them must hold."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators.extract.prepared import PreparedData
from speculators.extract.run import prepare
from speculators.extract.sourcing import ExtractOptions
from speculators.extract.store import HiddenStatesStore
from tests.tiny_models import SENTENCES

AUX = (2, 4, 5)
# Shards of about 120 tokens: several of them.
SMALL_SHARDS = 120 * 4 * 64 * 4
EXACT = ExtractOptions(dtype="float32", store_dtype="float32", batch_tokens=100, shard_bytes=SMALL_SHARDS)


def prepare_rows(verifier: Path, folder: Path, count: int = 9) -> PreparedData:
    """Conversations of different lengths, prepared."""
    path = folder / "data.jsonl"
    with path.open("w") as stream:
        for i in range(count):
            question, answer = SENTENCES[i % 6][: 8 + 7 * i], SENTENCES[(i + 2) % 6][: 60 - 6 * i]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return prepare(verifier, path, folder / "prepared", progress=False)


class Reference:
    """Transformers alone."""

    def __init__(self, verifier: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)

    @torch.no_grad()
    def states(self, ids_T: Tensor) -> Tensor:
        """Layers 2, 4 and 5 and what enters the final norm [T, 4, H]."""
        caught: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        output = self.model(ids_T[None], output_hidden_states=True)
        hook.remove()
        return torch.stack([*(output.hidden_states[layer][0] for layer in AUX), caught[0][0]], 1)


def check_store(store: HiddenStatesStore, prepared: PreparedData, reference: Reference) -> None:
    """Every row has its ids and mask, and the states that transformers computes for the row alone."""
    assert list(store.lengths) == list(prepared.lengths)
    for number in range(len(store)):
        ids, mask = prepared[number]
        sample = store[number]
        assert torch.equal(sample.input_ids, ids)
        assert torch.equal(sample.loss_mask, mask)
        states = torch.cat([sample.aux_hidden_states, sample.last_hidden_states[:, None]], 1)
        torch.testing.assert_close(states, reference.states(ids), atol=1e-5, rtol=0)
