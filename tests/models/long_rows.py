"""One training step over one document of many tokens, in a process of its own; prints what memory it took as JSON.

    python -m tests.models.long_rows eagle3 32768

The draft has one layer and one head, so that whatever is as large as the square of the document stands out: a grid of
bool of 32,768 tokens takes 1024 MiB, one of scores 4096 MiB.
"""

import json
import resource
import sys
from typing import Any

import torch

from speculators.models import FAMILIES
from speculators.models.draft_model import StepOutput
from tests.models.drafts import pack, random_speculator, verifier_head

TINY_HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"verifier": TINY_HEADS},
    "dflash": {"verifier": TINY_HEADS, "num_layers": 1, "block_size": 4},
}
KNOBS: dict[str, dict[str, Any]] = {"eagle3": {"ttt_steps": 2}, "dflash": {"max_anchors": 512}}


def step(family: str, length: int) -> StepOutput:
    """Forward and backward over one document, all of it supervised."""
    longest = {"verifier": {**TINY_HEADS, "max_position_embeddings": 2 * length}}
    speculator = random_speculator(family, **{**OPTIONS[family], **longest})
    batch = pack([[1] * length], row=length, num_aux=len(speculator.draft.aux_layer_ids))
    torch.manual_seed(0)
    output = FAMILIES[family].objective(**KNOBS[family]).step(speculator.draft.train(), batch, verifier_head())
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in speculator.draft.trained_parameters())
    return output


def main() -> None:
    family, length = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    step(family, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = step(family, length)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"loss": output.loss.item(), "counted": output.metrics["loss"].count, "mib": grown / 1024}))


if __name__ == "__main__":
    main()
