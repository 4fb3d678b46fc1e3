"""What tests of conversions share: a tiny verifier that has spoken, and conversions that leave nothing when refused."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import Conversion, convert
from speculators.errors import SpeculatorsError
from tests.convert.foreign import ForeignCheckpoint

# Tokens [T] and the verifier's hidden states of them, as transformers counts them, each [T, H].
Spoken = tuple[Tensor, tuple[Tensor, ...]]


def spoken_by(verifier: Path, vocabulary: int) -> Spoken:
    """Eleven tokens and all hidden states of a verifier."""
    model = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    tokens = torch.randint(2, vocabulary, (11,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
    return tokens, tuple(state[0] for state in states)


def converted(case: ForeignCheckpoint, folder: Path, verifier: Path, **options: Any) -> Conversion:
    """Convert with a checkpoint's own options and others; where that is refused, there must be no output."""
    given = ConvertOptions(**{**case.options, **options})
    source = case.write(folder / "foreign")
    try:
        return convert(source, folder / "ours", verifier=ConversionVerifier(str(verifier)), options=given)
    except SpeculatorsError:
        assert [path.name for path in folder.iterdir() if "ours" in path.name] == []
        raise
