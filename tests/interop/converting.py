"""Do PyPI's `speculators` and this project make the same of checkpoints of other projects?

    python -m tests.interop.converting --peer-python PEER/bin/python --out out/convert_peer.json

The checkpoints are those of `tests/convert/layouts_*.py` that its converters are for. The results are compared tensor
for tensor, and by what an engine reads in the configuration. Where they differ, or it refuses, `THEIRS` says what it
does that its source does not mean; a difference without a name is a failure, and so is a name without a difference.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import convert
from tests.convert import layouts_block, layouts_eagle, layouts_native
from tests.convert.foreign import ForeignCheckpoint
from tests.interop.compare import HERE, report_of
from tests.tiny_models import make_verifier

# The shared verifier's default, which vLLM takes where no layers are written.
DEFAULT_IDS = [2, 4, 5]
# algorithm -> the checkpoints it is meant for
CASES: dict[str, list[Callable[[], ForeignCheckpoint]]] = {
    "eagle3": [
        layouts_eagle.safeailab_eagle3,
        layouts_eagle.safeailab_eagle3_llama3,
        layouts_eagle.specforge,
        layouts_eagle.specforge_eagle31,
        layouts_eagle.specforge_other_width,
        layouts_eagle.angelslim,
        layouts_eagle.modelopt,
        layouts_eagle.modelopt_megatron,
        layouts_eagle.modelopt_float8,
        layouts_eagle.deepspec_eagle3,
        layouts_eagle.nebius,
        layouts_eagle.absolute_map,
        layouts_eagle.flags_alone,
        layouts_eagle.depth_ids,
    ],
    "dflash": [make for make in layouts_block.CASES if make().layout.endswith("dflash") or "dflash-" in make().layout],
    "mtp": [layouts_native.MTP_CASES[name] for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")],
}
_CAUSAL = "lets layers that were trained to see both ways be served causally"
_NO_MASK = "takes a checkpoint without t2d for one of the whole vocabulary, and drops its map"
_PREFIX = "does not strip the prefix of a wrapper"
_SHARDED = "reads no sharded file"
_HEAD = "saves a head of the verifier's too, all of it NaN"
# layout -> what PyPI's converter does there that the checkpoint does not mean, or cannot do
THEIRS = {
    "specforge": _SHARDED,
    "specforge-eagle3.1": "drops the norms of the features, and says in the configuration that they are there",
    "angelslim": f"{_PREFIX}, and saves random numbers for every tensor; does not read the ids of layers",
    "modelopt-eagle3": f"{_NO_MASK}; drops the second layer, the ids of layers and a nested rope base",
    "modelopt-megatron": _NO_MASK,
    "modelopt-float8": f"{_NO_MASK}; takes float8 numbers without their scales for the weights",
    "deepspec-eagle3": "knows three features and layers of Llama alone",
    "absolute-map": "leaves ids of tokens where offsets are read",
    "flags-alone": "leaves the map at zero, which means the first tokens",
    "depth-ids": "drops the norm before fc, the biases, and what the configuration says of layers and residual",
    "z-lab-dflash": _CAUSAL,
    "z-lab-dflash-nested": _SHARDED,
    "z-lab-dflash-mixed": f"{_CAUSAL}, and drops windows",
    "z-lab-dflash-unordered": f"{_CAUSAL}; writes ids that are not ascending, which engines sort",
    "z-lab-dflash-no-ids": "does not know the default of its producer",
    "z-lab-dflash-yarn": _CAUSAL,
    "specforge-dflash": _PREFIX,
    "modelopt-dflash": _PREFIX,
    "modelopt-dflash-windows": f"{_CAUSAL}, and drops windows",
    "encoder-dflash": "does not know the names of the encoder's tensors",
    "fused-dflash": _CAUSAL,
    "reduced-dflash": "reads no reduced vocabulary",
    "other-width-dflash": "reads no draft of another width than its verifier's",
    "deepspec-dflash": "does not read ids at the top level",
    "native-mtp-qwen3_next": _HEAD,
    "native-mtp-qwen3_5": _HEAD,
    "native-mtp-qwen3_5_moe": _HEAD,
}
# What an engine reads at the top level, and the value that it takes where nothing is written.
READ = {
    "norm_before_residual": None, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "draft_vocab_size": None, "target_hidden_size": None, "block_size": None, "mask_token_id": None,
    "sliding_window_non_causal": True, "sample_from_anchor": False, "aux_hidden_state_layer_ids": None,
    "eagle_aux_hidden_state_layer_ids": DEFAULT_IDS, "num_nextn_predict_layers": None,
}  # fmt: skip
READ_OF_LAYERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "hidden_act", "attention_bias",
)  # fmt: skip


def ask_peer(python: Path, request: dict[str, dict[str, Any]], folder: Path) -> dict[str, str | None]:
    question, answer = folder / "request.json", folder / "answer.json"
    question.write_text(json.dumps(request), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, HERE / "convert_with_peer.py", question, answer]
    subprocess.run(command, check=True, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=folder)
    found: dict[str, str | None] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def read_as_an_engine(directory: Path) -> dict[str, Any]:
    """The values of a configuration that change what is served, by name."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    layer = config["transformer_layer_config"]
    found = {key: default if config.get(key) is None else config[key] for key, default in READ.items()}
    found |= {f"layer.{key}": layer.get(key) for key in READ_OF_LAYERS}
    # On text, all axes of a rope of several carry the same position.
    rope = layer["rope_parameters"]
    found["layer.rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    found["layer.windows"] = [layer["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    return found


def differences(ours: Path, theirs: Path) -> list[str]:
    """Names of tensors and of values in the configuration that are not the same in both directories."""
    mine, other = (load_file(directory / "model.safetensors") for directory in (ours, theirs))
    differing = [name for name in sorted(mine.keys() | other.keys()) if not same(mine.get(name), other.get(name))]
    left, right = read_as_an_engine(ours), read_as_an_engine(theirs)
    return differing + [f"{key}: {left[key]} here, {right[key]} there" for key in left if left[key] != right[key]]


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left.double(), right.double())


def compare(python: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """One entry a layout: `algorithm`, `refused` (their words), `differ`, `theirs` (the fault's name) and `problem`."""
    shared = make_verifier(folder / "verifier")
    request: dict[str, dict[str, Any]] = {}
    for algorithm, makers in CASES.items():
        for case in (make() for make in makers):
            source = case.write(folder / case.layout)
            verifier = source if algorithm == "mtp" else shared
            out = folder / f"{case.layout}-ours"
            given = ConversionVerifier(str(verifier))
            convert(source, out, verifier=given, options=ConvertOptions(**case.options))
            options = {key: value for key, value in case.options.items() if key == "norm_before_residual"}
            request[case.layout] = {
                "source": str(source),
                "verifier": str(verifier),
                "algorithm": algorithm,
                "out": str(folder / f"{case.layout}-theirs"),
                "options": options,
            }
    report = {}
    for layout, refused in ask_peer(python, request, folder).items():
        differ = [] if refused else differences(folder / f"{layout}-ours", folder / f"{layout}-theirs")
        agree, named = not refused and not differ, THEIRS.get(layout)
        problem = None
        if agree and named:
            problem = "the two agree now; take its name out of the table"
        elif not agree and not named:
            problem = "a difference without a name"
        report[layout] = {
            "algorithm": request[layout]["algorithm"],
            "refused": refused and " ".join(refused.split())[:200],
            "differ": differ,
            "theirs": named,
            "problem": problem,
        }
    return report


if __name__ == "__main__":
    sys.exit(report_of(compare, __doc__))
