"""Do PyPI's `speculators` and this project read each other's directories, tensor for tensor?

    compare.py --peer-python PEER/bin/python --out out/interop.json

A random draft of every family that both know is written by this project, loaded by the other (`loads`, and whether each
tensor of the file has the same values there: `same_state_dict`), saved by it again, and loaded back (`loads_theirs`).
Floats are stored in float32, so that equal means equal.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from speculators.errors import SpeculatorsError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator

HERE = Path(__file__).resolve().parent
UNCOMPARED = ("dtype", "speculators_version", "architectures")
VOCAB, DRAFT_VOCAB = 128, 48
# name of the case -> family and the choices about its draft
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": DRAFT_VOCAB}),
    "eagle3-qwen3-full-vocabulary": (
        "eagle3",
        {"layer_type": "qwen3", "draft_vocab_size": None, "norm_before_fc": False, "fc_norm": True},
    ),
    "peagle": ("peagle", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "mask_token_id": 127}),
    "dflash": ("dflash", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "block_size": 8, "mask_token_id": 127}),
    "dflash-full-vocabulary": (
        "dflash",
        {"draft_vocab_size": None, "num_layers": 2, "block_size": 8, "mask_token_id": 127},
    ),
    "dflash2": ("dflash2", {"num_layers": 2, "block_size": 8, "mask_token_id": 127, "selector_rank": 32}),
    "dspark": (
        "dspark",
        {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "block_size": 8, "mask_token_id": 127, "markov_rank": 32},
    ),
    "mtp": ("mtp", {}),
}


def make_verifier(folder: Path) -> Path:
    """Save a random 8-layer Qwen3 in float32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def random_draft(family: str, choices: dict[str, Any], verifier: Path) -> Speculator:
    """A draft whose trained numbers are all random, norms included."""
    shape = json.loads((verifier / "config.json").read_text(encoding="utf-8"))
    config = FAMILIES[family].draft(**choices).resolve(VerifierShape.from_config_dict(shape, str(verifier)))
    reduced = config.num_draft_ids < config.verifier_vocab_size
    vocab = DraftVocab.from_ids(range(3, 3 + 2 * DRAFT_VOCAB, 2), VOCAB) if reduced else None
    speculator = Speculator.create(config, load_verifier_weights(verifier), vocab)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in speculator.draft.trained_parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return speculator


def digest(tensor: torch.Tensor) -> list:
    wide = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64).contiguous()
    return [list(tensor.shape), hashlib.sha256(wide.numpy().tobytes()).hexdigest()]


def reads_back(folder: Path, ours: Speculator) -> str | None:
    """What is wrong with the directory that the other software has saved, None where it is what we wrote."""
    try:
        loaded = Speculator.from_pretrained(folder).attach_verifier(
            load_verifier_weights(ours.config.verifier.name_or_path)
        )
    except SpeculatorsError as error:
        return str(error)
    expected, found = ours.draft.state_dict(), loaded.draft.state_dict()
    differing = [name for name in expected if not torch.equal(expected[name].float(), found[name].float())]
    written, read = _flat(ours.config.to_json()), _flat(loaded.config.to_json())
    # The other writer adds keys of its own, which stand beside ours; `dtype` is that of what it loaded.
    differing += [key for key, value in written.items() if key not in UNCOMPARED and read.get(key) != value]
    return None if not differing else f"differ: {', '.join(differing)}"


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    layer = {f"transformer_layer_config.{key}": value for key, value in config["transformer_layer_config"].items()}
    return {key: value for key, value in config.items() if key != "transformer_layer_config"} | layer


def ask_peer(python: Path, request: dict[str, dict[str, str]], folder: Path) -> dict[str, Any]:
    question, answer = folder / "request.json", folder / "answer.json"
    question.write_text(json.dumps(request), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, HERE / "with_peer.py", question, answer]
    subprocess.run(command, check=True, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=folder)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def compare(python: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """One entry a case: `family`, `loads`, `same_state_dict`, `loads_theirs`, and `problem` where one of them fails."""
    verifier = make_verifier(folder / "verifier")
    drafts = {case: random_draft(family, choices, verifier) for case, (family, choices) in CASES.items()}
    request = {}
    for case, draft in drafts.items():
        draft.save_pretrained(folder / case, dtype=torch.float32)
        request[case] = {"read": str(folder / case), "write": str(folder / f"{case}-again")}
    answers, report = ask_peer(python, request, folder), {}
    for case, draft in drafts.items():
        answer = answers[case]
        stored = {name: digest(tensor) for name, tensor in load_file(folder / case / "model.safetensors").items()}
        differing = [name for name, value in stored.items() if answer["tensors"].get(name) != value]
        loads = answer["error"] is None
        back = reads_back(folder / f"{case}-again", draft) if loads else "it saved nothing"
        report[case] = {
            "family": CASES[case][0],
            "loads": loads,
            "same_state_dict": loads and not differing,
            "loads_theirs": back is None,
            "problem": answer["error"] or (f"differ there: {', '.join(differing)}" if differing else back),
        }
    return report


def report_of(compare: Callable[[Path, Path], dict[str, dict[str, Any]]], description: str | None) -> int:
    """Compare with the peer that the command line names, write and print the report; the exit code: 1 for problems."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = compare(args.peer_python.absolute(), Path(folder))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0 if all(not entry["problem"] for entry in report.values()) else 1


if __name__ == "__main__":
    sys.exit(report_of(compare, __doc__))
