"""Verifiers of transformers with an MTP block of their own kind, through the whole runtime."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.attention_interface import ATTENTION_NAME
from speculators.models.draft_model import PackedBatch
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.objective import MtpObjective
from speculators.models.speculator import Speculator
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.models.mtp.verifiers import RAW

PROMPT = [7, 21, 3, 15, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)


def verifier_of(style: str) -> Verifier:
    """A random verifier of this style, its layers all full attention, with norms that are not neutral."""
    raw = {key: value for key, value in RAW[style].items() if key not in ("quantization_config", "auto_map")}
    raw |= {"layer_types": ["full_attention"] * 4} if style == "qwen3_next" else {}
    config = AutoConfig.for_model(raw.pop("model_type"), **raw, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return Verifier(model, None)


@pytest.mark.parametrize("style", ["qwen3_next", "deepseek", "glm"])
def test_a_block_learns_the_verifiers_answer_and_changes_none(style: str) -> None:
    verifier = verifier_of(style)
    raw = {**verifier.config.to_dict(), "architectures": ["X"]}
    config = MtpDraft().resolve(VerifierShape.from_config_dict(raw, "random"))
    assert config.transformer_layer_config.num_routed_experts > 0
    weights = VerifierWeights.from_model(verifier.model)
    speculator = Speculator.create(config, weights, seed=3)
    plain = LLM.from_parts(verifier).generate([PROMPT, [1, 2]], GREEDY, use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in plain]
    ids = PROMPT + answers[0]
    states = verifier.capture([ids], [4])[0][:, 0]
    batch = PackedBatch(
        input_ids=torch.tensor([ids]),
        loss_mask=torch.ones(1, len(ids), dtype=torch.bool),
        aux_hidden_states=states.new_zeros(1, len(ids), 0),
        last_hidden_states=states[None].clone(),
        document_ids=torch.zeros(1, len(ids), dtype=torch.int64),
        position_ids=torch.arange(len(ids))[None],
    )
    head, objective = VerifierHead.from_weights(weights), MtpObjective(num_steps=1)
    optimizer = torch.optim.Adam(list(speculator.draft.trained_parameters()), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        objective.step(speculator.draft, batch, head).loss.backward()
        optimizer.step()
    together, alone = (LLM.from_parts(verifier, speculator, num_speculative_tokens=depth) for depth in (3, 1))
    served = together.generate([PROMPT, [1, 2]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in served] == answers
    (served_alone,) = alone.generate([PROMPT], GREEDY, use_tqdm=False)
    assert served_alone.outputs[0].token_ids == answers[0]
    # Two tokens a verification, from the second on.
    assert alone.stats.num_drafts == alone.stats.num_accepted_tokens == 10
