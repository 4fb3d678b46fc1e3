"""An EAGLE-3 speculator out to other projects' layouts and back: the same acceptance; with its ids shifted: named.

`python -m tests.convert.round_trip --speculator DIR --out out/round_trip.json` needs a trained speculator without the
norms that those layouts do not have: `speculators quickstart draft.norm_before_residual=false
draft.norm_before_fc=false draft.norm_output=false` makes one. The verifier is the speculator's.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculators.convert.check import MAX_NEW_TOKENS, Check, built_in_prompts, check
from speculators.convert.export import export
from speculators.convert.options import ConversionVerifier
from speculators.convert.run import convert
from speculators.models.speculator import Speculator
from speculators.runtime.evaluate import Conversation, EvaluateOptions, measure_acceptance
from speculators.runtime.verifier import Verifier

LAYOUTS = ("safeailab-eagle3", "sglang", "modelopt-eagle3")
# The layout whose files name layer ids, as outputs.
SHIFTED = "sglang"


def counts(directory: Path, verifier: Verifier, prompts: Sequence[Conversation], tokens: int) -> dict[str, Any]:
    """What the verifier accepts of a speculator's drafts."""
    speculator = Speculator.from_pretrained(directory)
    stats = measure_acceptance(verifier, speculator, prompts, EvaluateOptions(max_new_tokens=tokens, max_num_seqs=8))
    return {
        "acceptance_length": stats.acceptance_length,
        "num_drafts": stats.num_drafts,
        "accepted_per_position": stats.accepted_per_position,
    }


def there_and_back(directory: Path, layout: str, folder: Path) -> Path:
    """The speculator that a speculator is after having been in a layout."""
    name = Speculator.from_pretrained(directory).config.verifier.name_or_path
    theirs = export(directory, layout, folder / layout)
    return convert(theirs, folder / f"from-{layout}", verifier=ConversionVerifier(name)).directory


def shifted(directory: Path, folder: Path, verifier: Verifier, prompts: Sequence[Conversation], tokens: int) -> Check:
    """What a check says of an exported copy whose layer ids were counted wrongly by one."""
    name = Speculator.from_pretrained(directory).config.verifier.name_or_path
    theirs = export(directory, SHIFTED, folder / "shifted")
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    block, key = config["eagle_config"], "eagle_aux_hidden_state_layer_ids"
    block[key] = [item + 1 for item in block[key]]
    (theirs / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ours = convert(theirs, folder / "from-shifted", verifier=ConversionVerifier(name)).directory
    return check(ours, prompts, verifier=verifier, max_new_tokens=tokens)


def report(directory: Path, tokens: int = MAX_NEW_TOKENS) -> dict[str, Any]:
    """Acceptance before and after every layout, and what a check says of the speculator and of a shifted copy."""
    verifier = Verifier.from_pretrained(Speculator.from_pretrained(directory).config.verifier.name_or_path)
    prompts = built_in_prompts()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        before = counts(directory, verifier, prompts, tokens)
        back = {name: counts(there_and_back(directory, name, folder), verifier, prompts, tokens) for name in LAYOUTS}
        whole = check(directory, prompts, verifier=verifier, max_new_tokens=tokens)
        wrong = shifted(directory, folder, verifier, prompts, tokens)
    return {
        "speculator": before,
        "back": back,
        "same": all(found == before for found in back.values()),
        "check": whole.to_json(),
        "warning": whole.warning,
        "shifted": wrong.to_json(),
        "shifted_warning": wrong.warning,
        "named": wrong.better is not None and wrong.better.reading.name == "layer ids - 1",
    }


def main() -> None:
    """Write the report; the process fails where acceptance differs or the shift is not named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculator", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=MAX_NEW_TOKENS)
    arguments = parser.parse_args()
    found = report(arguments.speculator, arguments.tokens)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    if not found["same"] or not found["named"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
