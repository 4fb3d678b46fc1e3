"""The model card of a speculator: its README.md, with the numbers that were measured and no others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from speculators.formats.checkpoint import read_json_object
from speculators.formats.config import SpeculatorConfig
from speculators.formats.files import looks_like_path, write_text
from speculators.formats.vllm_reading import INSTEAD, SERVED

Row = tuple[str, str]

# Stands for the speculator's name in a card that was written before there was one.
PLACEHOLDER = "path/to/this/directory"
_MEASURED = "## Measured: "


def write_card(
    directory: str | os.PathLike[str],
    config: SpeculatorConfig,
    evaluations: Mapping[str, Mapping[str, Any]] | None = None,
    training: Mapping[str, Any] | None = None,
    repo: str | None = None,
) -> Path:
    """Write the card into a speculator directory and return its path; arguments as for `model_card`."""
    path = Path(directory) / "README.md"
    write_text(path, model_card(config, evaluations, training, repo))
    return path


def model_card(
    config: SpeculatorConfig,
    evaluations: Mapping[str, Mapping[str, Any]] | None = None,
    training: Mapping[str, Any] | None = None,
    repo: str | None = None,
) -> str:
    """Return the Markdown text of a speculator's card.

    `evaluations` maps a title ("held-out prompts") to what `evaluation.json` holds; `training` maps names to numbers or
    words, in the order of the table. What is absent or null is left out; DataError where a number is not finite.
    `repo` is the hub id under which the speculator will be found, a placeholder path where there is none.
    """
    verifier = config.verifier.name_or_path
    name = repo or PLACEHOLDER
    title = (repo or f"{config.speculators_model_type} speculator for {Path(verifier).name}").rpartition("/")[2]
    sections = [_front_matter(config), f"# {title}", _summary(config), _usage(config, name)]
    for what, numbers in (evaluations or {}).items():
        sections.append(_evaluation(what, numbers))
    if training:
        rows = [(key.replace("_", " "), _value(key, value)) for key, value in training.items() if value is not None]
        sections.append("## Training\n\n" + _table(("", ""), rows))
    return "\n\n".join(section for section in sections if section) + "\n"


def completed_card(text: str, config: SpeculatorConfig, evaluations: Mapping[str, Mapping[str, Any]], repo: str) -> str:
    """Return a card that somebody wrote, ready to be pushed; what it says stays as it is.

    The placeholder becomes `repo`, what a hub reads at the top is added where it is absent, and so are the measurements
    where the card has none.
    """
    text = text.replace(PLACEHOLDER, repo)
    if not text.startswith("---\n"):
        text = f"{_front_matter(config)}\n\n{text}"
    if not any(line.startswith(_MEASURED) for line in text.splitlines()):
        text = "\n\n".join((text.rstrip(), *(_evaluation(title, numbers) for title, numbers in evaluations.items())))
    return text.rstrip() + "\n"


def read_evaluations(directory: str | os.PathLike[str]) -> dict[Path, dict[str, Any]]:
    """Return what was measured of a speculator: every `evaluation*.json` in its directory and beside it.

    A file beside it that names another directory as its speculator is left out. DataError where one is unreadable.
    """
    folder = Path(directory).resolve()
    found: dict[Path, dict[str, Any]] = {}
    for path in (*sorted(folder.glob("evaluation*.json")), *sorted(folder.parent.glob("evaluation*.json"))):
        try:
            report = read_json_object(path)
        except (ValueError, OSError) as error:
            raise DataError(
                f"{error}; expected the report of an evaluation, or no file of this name", path=path
            ) from None
        speculator = report.get("speculator")
        named = Path(speculator).name if isinstance(speculator, str) else folder.name
        if path.parent == folder or named == folder.name:
            found[path] = report
    return found


def title_of(path: Path) -> str:
    """Return the title of a measurement by its file: `evaluation_chat.json` is "chat"."""
    return path.stem.removeprefix("evaluation").strip("_-. ").replace("_", " ") or "evaluation"


def _front_matter(config: SpeculatorConfig) -> str:
    lines = ["---", "library_name: speculators", "pipeline_tag: text-generation"]
    verifier = config.verifier.name_or_path
    if not looks_like_path(verifier):
        lines.append(f"base_model: {json.dumps(verifier)}")
    tags = ["speculators", "speculative-decoding", config.speculators_model_type]
    tags += ["vllm"] if config.speculators_model_type in SERVED else []
    return "\n".join([*lines, "tags:", *(f"- {json.dumps(tag)}" for tag in tags), "---"])


def _summary(config: SpeculatorConfig) -> str:
    drafted, depths = config.num_speculative_tokens, config.aux_layer_ids
    features = f"of depths {', '.join(map(str, depths))}" if depths else "after its final norm"
    return (
        f"A draft model for speculative decoding with `{config.verifier.name_or_path}`: it proposes {drafted} "
        f"token{'s' if drafted > 1 else ''} per step, the verifier keeps those that it would have written itself, and "
        f"the text stays the verifier's own.\n\n"
        f"Family `{config.speculators_model_type}`, {config.network()}, "
        f"verifier features {features}."
    )


def _usage(config: SpeculatorConfig, name: str) -> str:
    example, verifier, kind = "How do rainbows form?", config.verifier.name_or_path, config.speculators_model_type
    notes = []
    commands = f'speculators generate {name} --chat "{example}"\nspeculators serve {name} --port 8000\n'
    if kind in SERVED:
        newer = "VLLM_USE_V2_MODEL_RUNNER=1 " if SERVED[kind].runner == "V2" else ""
        commands += f"{newer}vllm serve {name}\n"
    else:
        notes.append(f"vLLM does not read this directory as it is: {INSTEAD[kind]}." if kind in INSTEAD else "")
    if looks_like_path(verifier):
        notes.append(f"The verifier is found at `{verifier}`; engines need it there.")
    python = (
        f"from speculators import LLM, SamplingParams\n\n"
        f'llm = LLM("{name}")\n'
        f'print(llm.generate(["{example}"], SamplingParams(max_tokens=128))[0].outputs[0].text)\n'
    )
    parts = ["## Use", f"```bash\n{commands}```", f"```python\n{python}```", *notes]
    return "\n\n".join(part for part in parts if part)


def _evaluation(title: str, numbers: Mapping[str, Any]) -> str:
    """One measurement: its conditions, what was accepted at each position, and speed and identity where known."""
    rows = list(_rows(numbers, _CONDITIONS))
    rows += _rows(numbers, (("acceptance_length", "acceptance length"), ("num_drafts", "verifications with drafts")))
    rows += _rows(numbers, (("num_draft_tokens", "draft tokens"), ("num_accepted_tokens", "accepted draft tokens")))
    speed, identity = _block(numbers, "speed"), _block(numbers, "identity")
    rows += _rows(speed, _SPEED)
    if identity.get("identical") is not None:
        rows += _rows(identity, (("dtype", "dtype of the identity check"), ("identical", "greedy output identical")))
    parts = [f"{_MEASURED}{_plain(title)}", _table(("", ""), rows), _positions(numbers)]
    return "\n\n".join(part for part in parts if part)


_CONDITIONS = (
    ("method", "method"),
    ("num_speculative_tokens", "draft tokens per step"),
    ("num_prompts", "prompts"),
    ("max_new_tokens", "new tokens per prompt, at most"),
    ("temperature", "temperature"),
)
_SPEED = (
    ("dtype", "dtype of the speed measurement"),
    ("plain", "tokens per second without speculation"),
    ("speculative", "tokens per second with speculation"),
    ("speedup", "speed-up"),
)
_PER_POSITION = (
    ("accepted_per_position", "accepted"),
    ("acceptance_rate_per_position", "acceptance"),
    ("conditional_acceptance_per_position", "acceptance given all before"),
)


def _positions(numbers: Mapping[str, Any]) -> str:
    columns = {label: numbers[key] for key, label in _PER_POSITION if numbers.get(key) is not None}
    for label, values in columns.items():
        if not isinstance(values, list | tuple):
            raise DataError(f"evaluation: {label} per position is {values!r}; expected a list of numbers")
    if not any(columns.values()):
        return ""
    rows = []
    for position in range(max(len(values) for values in columns.values())):
        cells = [values[position] if position < len(values) else None for values in columns.values()]
        shown = ["" if cell is None else _value(label, cell) for label, cell in zip(columns, cells, strict=True)]
        rows.append((str(position + 1), *shown))
    return _table(("position", *columns), rows)


def _rows(numbers: Mapping[str, Any], wanted: Iterable[Row]) -> list[Row]:
    return [(label, _value(key, numbers[key])) for key, label in wanted if numbers.get(key) is not None]


def _block(numbers: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = numbers.get(key)
    if block is not None and not isinstance(block, Mapping):
        raise DataError(f"evaluation: {key} is {block!r}; expected an object")
    return block or {}


def _value(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) and isfinite(value):
        return f"{value:.4g}"
    if isinstance(value, str):
        return _plain(value)
    raise DataError(f"model card: {key} is {value!r}; expected a finite number, a word or null")


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
