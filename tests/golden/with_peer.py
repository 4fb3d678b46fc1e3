"""Make `further.json` with PyPI's `speculators` 0.9.0: run by the Python of an environment that has it.

    .venv-peer/bin/python tests/golden/with_peer.py tests/golden/further.json

`make test-interop` makes that environment. The keys are those of golden.json, over the folders of `variants.py`, with
"@" and the row's name where it is not the one that is kept.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch._dynamo
from safetensors.torch import load_file
from speculators.config import SpeculatorModelConfig
from speculators.model import SpeculatorModel
from variants import build, write_row

EAGLE3 = {"loss_fn": "kl_div", "ttt_step_loss_decay": 0.8, "ttt_steps": 3}
BLOCK = {"loss_fn": "kl_div", "max_anchors": 512}
MIXTURE = '{"ce": 0.1, "tv": 0.9}'
DPACE = {"loss_fn": "ce", "max_anchors": 512, "per_position_loss_weight": "dpace", "dpace_alpha": 0.3}
CASES = [
    *(("eagle3", EAGLE3 | {"loss_fn": name}) for name in ("rkl", "jsd", "nla", "lk_hybrid")),
    ("eagle3", EAGLE3 | {"loss_fn": '{"kl_div":0.5,"rkl":0.25,"jsd":2}'}),
    ("eagle3", EAGLE3 | {"ttt_steps": 5, "ttt_step_loss_decay": 1.0}),
    ("eagle3", EAGLE3 | {"ttt_steps": 7}),
    ("eagle3_full", EAGLE3),
    ("eagle3_full", EAGLE3 | {"loss_fn": "tv", "ttt_steps": 2}),
    ("eagle3_plain", EAGLE3),
    ("eagle3_fc_norm", EAGLE3),
    ("dflash", BLOCK | {"per_position_loss_weight": "dpace"}),
    ("dflash", BLOCK | {"loss_fn": "nla", "dflash_decay_gamma": 7.0}),
    ("dflash_block_8", BLOCK),
    ("dflash_non_causal", BLOCK),
    ("dflash_reduced", BLOCK),
    ("dflash_reduced", DPACE),
    ("dflash2", DPACE),
    ("dflash2", BLOCK | {"selector_loss_alpha": 0.25}),
    ("dspark", BLOCK | {"loss_fn": "lk_hybrid", "dflash_decay_gamma": 7.0, "confidence_head_alpha": 0.25}),
    ("dspark_gated", BLOCK),
    ("dspark_gated", DPACE),
    ("dspark_rnn", BLOCK),
    ("dspark_rnn", DPACE),
    ("dspark_no_confidence", BLOCK),
    ("dspark_plain_confidence", BLOCK),
    ("mtp", {"num_speculative_steps": 3, "step_weight_beta": 0.9}),
    ("mtp_2", {"num_speculative_steps": 2}),
    ("eagle3_qwen3", EAGLE3),
    ("eagle3_biased", EAGLE3 | {"loss_fn": "rkl", "ttt_steps": 4}),
    ("eagle3@holes", EAGLE3),
    ("eagle3@single", EAGLE3),
    ("eagle3_full@documents", EAGLE3),
    ("eagle3_qwen3@documents", EAGLE3 | {"loss_fn": MIXTURE}),
    ("dflash_full_layers", BLOCK),
    ("dflash_from_anchor", BLOCK | {"loss_fn": "rkl"}),
    ("dflash_reduced@holes", BLOCK | {"loss_fn": MIXTURE, "per_position_loss_weight": "dpace"}),
    ("dflash@documents", BLOCK),
    ("dflash2_small", BLOCK),
    ("dflash2_small@documents", BLOCK | {"per_position_loss_weight": "dpace"}),
    ("dspark_full", BLOCK | {"loss_fn": MIXTURE}),
    ("dspark_full@holes", BLOCK | {"per_position_loss_weight": "dpace", "confidence_head_alpha": 2}),
    ("dspark_gated@holes", BLOCK | {"loss_fn": "jsd"}),
    ("dspark_rnn@documents", BLOCK),
    ("mtp_1", {"num_speculative_steps": 1}),
    ("mtp_4@holes", {"num_speculative_steps": 4, "step_weights": [1.0, 0.5, 0.25, 2]}),
    ("mtp@documents", {"num_speculative_steps": 3}),
]


def compute(folder: Path, row: Path, settings: dict) -> dict:
    """Loss and gradient norms of one case by that software, in float32."""
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    # Its default attention has no backward pass on a CPU.
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = SpeculatorModel.from_pretrained(str(folder), config=config).float().eval()
    inputs = load_file(row)
    inputs = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    if config.speculators_model_type == "mtp":
        inputs["hidden_states"] = inputs.pop("verifier_last_hidden_states")
        del inputs["document_ids"]
    train, _ = model.get_trainer_kwargs(**settings, loss_implementation="eager")
    loss = model(**inputs, **train)[1]
    loss.backward()
    norms = {name: item.grad.norm().item() for name, item in model.named_parameters() if item.grad is not None}
    return {"loss": loss.item(), "grad_norms": norms}


def main(target: str) -> None:
    found, path = {}, Path(target).resolve()
    with tempfile.TemporaryDirectory() as work:
        # Folders name their verifier as golden/verifier, from where the software runs.
        os.chdir(work)
        for case, settings in CASES:
            name, at, row = case.partition("@")
            folder, inputs = build(name, Path("golden")), write_row(row, Path())
            found[f"{name}|{json.dumps(settings, sort_keys=True)}{at}{row}"] = compute(folder, inputs, settings)
            print(f"{len(found)} of {len(CASES)}", file=sys.stderr)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True
    main(*sys.argv[1:])
