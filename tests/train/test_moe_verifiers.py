"""Verifiers that route tokens to experts: what a draft is taught is what they compute, and serving changes nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from speculators.extract.store import HiddenStatesStore
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.train.config import TrainConfig
from speculators.train.metrics import read_metrics
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe
from speculators.train.stages import Run
from tests.tiny_models import END, START, make_tokenizer
from tests.verifier_configs import TINY

# Experts in every layer; the same with attention sinks, windows and biases; fused experts; latent attention, a dense
# first layer and a router of groups.
KINDS = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3")
FAMILIES: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 128, "num_speculative_tokens": 3},
    "dflash": {"draft_vocab_size": 128, "num_layers": 2, "block_size": 4},
}
PROMPT, ANSWER = 6, 24


@dataclass(frozen=True)
class Answered:
    """A verifier's folder, transformers' own model of it, and that model's greedy answers to random prompts."""

    folder: Path
    model: PreTrainedModel
    rows: list[list[int]]


@pytest.fixture(scope="module", params=KINDS)
def answered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Weights wide enough for answers to differ, norms that are not ones, and routers that choose by the token."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), make_tokenizer()
    config = TINY[request.param]()
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 256
    config.bos_token_id, config.eos_token_id = (tokenizer.convert_tokens_to_ids(token) for token in (START, END))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise.clamp(-2, 2) if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts = torch.randint(3, len(tokenizer), (10, PROMPT), generator=generator)
    options = {"do_sample": False, "max_new_tokens": ANSWER, "eos_token_id": None, "pad_token_id": 0}
    rows = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    return Answered(folder, model, rows.tolist())


def make_recipe(family: str, answered: Answered, folder: Path) -> Recipe:
    """Two dozen steps on the answers, two of which are held back."""
    rows = folder / "rows.jsonl"
    mask = [0] * PROMPT + [1] * ANSWER
    lines = [json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids in answered.rows]
    rows.write_text("".join(lines), encoding="utf-8")
    draft = dict(FAMILIES[family])
    if "block_size" in draft:
        # The last row of the embeddings, the default, may be a token of these answers.
        draft["mask_token_id"] = min(set(range(2, answered.model.config.vocab_size)) - set().union(*answered.rows))
    return Recipe(
        name="experts",
        verifier=str(answered.folder),
        family=family,
        draft=draft,
        data=DataConfig(train=(str(rows),), validation_rows=2),
        extract=ExtractConfig(dtype="float32", store_dtype="float32"),
        train=TrainConfig(
            epochs=12, row_length=128, learning_rate=1e-2, measure_prompts=2, measure_tokens=6, measure_every=12
        ),
        out=str(folder / "out"),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_is_taught_the_verifiers_law_and_serving_keeps_its_answers(
    family: str, answered: Answered, tmp_path: Path
) -> None:
    """The teacher's logits are rebuilt from stored states, and greedy answers are those of transformers alone."""
    run = Run(make_recipe(family, answered, tmp_path), progress=False)
    run.run(("prepare-data", "extract", "train"))
    store = HiddenStatesStore.open(run.outputs.states)
    head = VerifierHead.from_weights(load_verifier_weights(answered.folder))
    for sample in (store[0], store[7]):
        with torch.no_grad():
            expected = answered.model(input_ids=sample.input_ids[None]).logits[0]
        torch.testing.assert_close(head.logits(sample.last_hidden_states), expected, atol=1e-5, rtol=1e-5)
    lines = list(read_metrics(run.outputs.out / "metrics.jsonl"))
    assert lines[-1]["loss"] < lines[0]["loss"]
    # Layers of a draft are dense, whatever the verifier's are.
    saved = Speculator.from_pretrained(run.outputs.speculator).draft.state_dict()
    assert not [name for name in saved if "expert" in name]
    llm = LLM(run.outputs.speculator, dtype="float32")
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids[:PROMPT]} for ids in answered.rows], sampling, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [ids[PROMPT:] for ids in answered.rows]
    # Drafts were accepted and rejected, so that passes of several tokens were kept whole and in part.
    assert llm.stats is not None
    assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens
