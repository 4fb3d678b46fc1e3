"""Which layouts are read and written, found by reading and writing them.

`python -m tests.convert.layouts_table --out out/layouts.json` writes `[{layout, source, family, read, written,
identity}]`: `written` are the layouts that the converted draft can be exported to, `identity` those of them from which
it comes back with the same configuration and tensors. With `--readme README.md` the README's table is written too.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.convert.detect import detect
from speculators.convert.export import export
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import convert
from speculators.convert.source import SourceCheckpoint
from speculators.convert.sources import SOURCES
from speculators.convert.targets import TARGETS
from speculators.errors import FormatError
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.mutation_kinds import is_native
from tests.convert.mutations import CASES
from tests.tiny_models import make_verifier

# What is read without being a draft of one of the layouts' cases.
_BESIDES = {
    "pard": "PARD models, kept as they are beside a `speculative_config.json` that `LLM(DIR)` reads",
    "speculators": "directories of older versions of `speculators`",
}
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"


@dataclass(frozen=True)
class Row:
    """One checkpoint: the key in SOURCES that read it, the family it became, where that can go, and comes back from."""

    layout: str
    source: str
    family: str
    written: tuple[str, ...]
    identity: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "read": True}


def row_of(case: ForeignCheckpoint, verifier: ConversionVerifier) -> Row:
    """Read a checkpoint, write it in every layout that takes it, and read that again."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        source = case.write(folder / "foreign")
        opened = SourceCheckpoint.open(source)
        known = ConversionVerifier(str(source)) if is_native(case) else verifier
        options = ConvertOptions(**case.options)
        ours = convert(source, folder / "ours", verifier=known, options=options)
        written, identity = [], []
        for layout in TARGETS:
            try:
                theirs = export(ours.directory, layout, folder / layout)
            except FormatError:
                continue
            written.append(layout)
            again = convert(theirs, folder / f"from-{layout}", verifier=known, options=_told(case))
            if _files(again.directory) == _files(ours.directory):
                identity.append(layout)
        shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
        return Row(case.layout, detect(opened.config, shapes), ours.plan.family, tuple(written), tuple(identity))


def _told(case: ForeignCheckpoint) -> ConvertOptions:
    """How many tokens are drafted, which no layout says."""
    tokens = case.options.get("speculative_tokens")
    return ConvertOptions(speculative_tokens=tokens) if tokens else ConvertOptions()


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def rows_of(folder: Path) -> list[Row]:
    """Every checkpoint's row; `folder` is for a verifier."""
    verifier = ConversionVerifier(str(make_verifier(folder)))
    return [row_of(make(), verifier) for make in CASES]


def readme_table(rows: list[Row]) -> str:
    """A line for each way of reading: what it reads, and the names to write it by."""
    lines = ["| `--family` | read from | `--to` |", "|---|---|---|"]
    for source in SOURCES:
        mine = [row for row in rows if row.source == source]
        targets = [layout for layout in TARGETS if any(layout in row.identity for row in mine)]
        read = ", ".join(row.layout for row in mine) or _BESIDES.get(source, "-")
        lines.append(f"| {source} | {read} | {', '.join(f'`{name}`' for name in targets) or '-'} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table, and the README's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        rows = rows_of(Path(parent) / "verifier")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([row.to_json() for row in rows], indent=1)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    if arguments.readme is not None:
        before, _, rest = arguments.readme.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        arguments.readme.write_text(f"{before}{BEGIN}\n{readme_table(rows)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
