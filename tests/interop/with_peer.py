"""Run by the Python of an environment with PyPI's `speculators`: load directories with it and save them again.

    with_peer.py REQUEST.json ANSWER.json

REQUEST.json maps a name to `{"read": DIRECTORY, "write": DIRECTORY}`. ANSWER.json gets, for each name, `error` (null
where all went well) and `tensors`: name -> [shape, SHA-256 of the values in float32 (integers as int64)].
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch
from speculators.model import SpeculatorModel


def digest(tensor: torch.Tensor) -> list:
    wide = tensor.detach().to(torch.float32 if tensor.is_floating_point() else torch.int64).contiguous()
    return [list(tensor.shape), hashlib.sha256(wide.numpy().tobytes()).hexdigest()]


def main(request_path: str, answer_path: str) -> None:
    answer = {}
    for name, folders in json.loads(Path(request_path).read_text(encoding="utf-8")).items():
        try:
            model = SpeculatorModel.from_pretrained(folders["read"])
            model.save_pretrained(folders["write"])
        # A refusal is a finding, and the next directory is still to be asked about.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            answer[name] = {"error": f"{type(error).__name__}: {error}", "tensors": {}}
            continue
        tensors = {key: digest(tensor) for key, tensor in model.state_dict().items()}
        answer[name] = {"error": None, "tensors": tensors}
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
