"""What a resolved DSpark speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from speculators.formats.config import TensorSpec
from speculators.models.dflash.config import BlockDraftConfig

MarkovKind = Literal["vanilla", "gated", "rnn"]
Temperature = Annotated[float, Field(gt=0, le=1e6)]


class DSparkConfig(BlockDraftConfig):
    """DSpark: a block drafter whose slots are sampled left to right, each biased by the token before it.

    Whether the slots of a block see each other is a matter of the layer, as vLLM reads it: in a layer with a window
    (`sliding_attention`) a slot sees those before it alone, in one without it sees the whole block; with
    `transformer_layer_config.is_causal` none sees a later one. `sliding_window_non_causal` is not read by vLLM, and
    true beside a window is an error. `sample_from_anchor` is always written: without it vLLM takes false.

    `confidence_temperatures` divide the confidence head's logits, one a draft token (see `calibration`). They stand
    here, and are written only where there are any, because no tensor may hold them: vLLM refuses tensors that it does
    not know, and drops a key that it does not know, so that its own confidences stay uncalibrated.
    """

    architectures: list[str] = Field(default=["DSparkDraftModel"], min_length=1)
    speculators_model_type: Literal["dspark"] = Field(default="dspark", description="the speculator's family")
    sample_from_anchor: bool = True
    sliding_window_non_causal: bool = False
    markov_rank: int = Field(gt=0, le=1 << 16, description="width of the Markov head")
    markov_head_type: MarkovKind = Field(default="vanilla", description="how the Markov head makes its bias")
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list[Temperature] | None = Field(default=None, description="one a draft token")

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        if self.sliding_window_non_causal and "sliding_attention" in self.transformer_layer_config.layer_types:
            text = "sliding_window_non_causal is true, but engines run a DSpark draft's sliding layers causally"
            yield "causality-not-read", f"{text}: write false, or full_attention as layer_types"
        temperatures = self.confidence_temperatures
        if temperatures is not None and not self.enable_confidence_head:
            text = "confidence_temperatures are there, but enable_confidence_head is false"
            yield "contradiction", f"{text}: remove one of the two"
        if temperatures is not None and len(temperatures) != self.max_speculative_tokens:
            text = f"confidence_temperatures has {len(temperatures)} entries"
            yield "contradiction", f"{text}; expected {self.max_speculative_tokens}, one a token that a block predicts"

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds; temperatures only where the confidence head has been calibrated."""
        written = super().to_json()
        if self.confidence_temperatures is None:
            del written["confidence_temperatures"]
        return written

    def is_causal(self, layer: int) -> bool:
        """Whether a slot sees, in this layer, only the slots of its block that stand before it."""
        decoder = self.transformer_layer_config
        return bool(decoder.is_causal) or decoder.layer_types[layer] == "sliding_attention"

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as vLLM's DSpark loader names and shapes them.

        The heads of types gated and rnn are the reference implementation's; vLLM loads none but vanilla ones.
        """
        layer, rank = self.transformer_layer_config, self.markov_rank
        hidden = layer.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (layer.vocab_size, rank),
            "markov_head.markov_w2.weight": (self.draft_vocab_size, rank),
        }
        if self.markov_head_type == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if self.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.enable_confidence_head:
            width = hidden + (rank if self.confidence_head_with_markov else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return super().expected_tensors() | {name: TensorSpec(shape) for name, shape in shapes.items()}

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        confidence = " and a confidence head" if self.enable_confidence_head else ""
        return f"{super().network()}, a {self.markov_head_type} Markov head of rank {self.markov_rank}{confidence}"
