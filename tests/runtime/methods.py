"""Every method against plain decoding: greedy answers token for token, and the law of sampled ones.

    python -m tests.runtime.methods [--methods NAME ..] [--depths K ..] [--requests 3000] [--out out/methods.json]
                                    [--verifier NAME=DIR] [--workers N] [--against README.md] [--readme README.md]

For each method, each kind of tiny random verifier and each verifier that `--verifier` names (float32), each depth that
the method admits and batches of 1, 3 and 16, requests of mixed lengths, repetitive ones among them, that end by length,
by a token or by a text, are answered with drafts and without. Verifiers that are named get texts and questions, some of
which they end by themselves, and drafts with random weights of their shape. Batches of other shapes round otherwise,
and nothing is allowed for that: where an answer differs, how far the two likeliest logits lie apart is told, and the
row says no. Depths that a method does not admit must be refused by name. The joint law of the first four tokens is
compared with the exact law of a verifier of three tokens, by chi-square. Writes a line a method, and what each key of
the schema does to `schema_coverage.json` beside it; exit code 1 where an answer differs or a p is below 1e-4. Lines of
methods that are not run are kept. `--against` compares the table of a file with what was found: every cell but the
number p, which another machine's rounding changes, must be the same. `--readme` puts the table of `--out` into a file,
between its two markers, and does nothing else.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chi2 as chi2_law

from speculators.errors import EngineError
from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.schema_coverage import schema_coverage
from speculators.runtime.verifier import Verifier
from tests.runtime.asked import Asked
from tests.runtime.laws import LEAST, LENGTH, TEMPERATURE, codes, compared, stock_law
from tests.runtime.laws import PROMPTS as LAW_PROMPTS
from tests.runtime.served import GEMMA, KINDS, NATIVE, SMALL, SMALL_GEMMA, Directories

DEPTHS = (1, 2, 3, 5, 7, 16)
BATCHES = (1, 3, 16)
_NUMBER = re.compile(r"\([0-9.e-]+\)")
MARKERS = ("<!-- methods: begin -->", "<!-- methods: end -->")
REPEATING = "tests.runtime.custom_drafters.Repeating"


@dataclass(frozen=True)
class Case:
    """A method as a user asks for it: `config` makes the keys beside the depth, given the kind of verifier.

    `most` is the deepest draft, `only` the one depth that there is. `drawn` says whether drafts can be drawn. `small`:
    the verifier of three tokens that it drafts for, if any.
    `vllm_032` is what vLLM 0.32 does with it (facts, from its code and from running it on a CPU).
    """

    name: str
    config: Callable[[Directories, str], dict[str, Any]]
    vllm_032: str
    most: int = MAX_SPECULATIVE_TOKENS
    only: int | None = None
    drawn: bool = True
    verifiers: tuple[str, ...] = KINDS
    small: str | None = SMALL

    def depths(self, asked: Sequence[int] = DEPTHS) -> list[int]:
        """Those of the depths asked for that it admits."""
        if self.only is not None:
            return [self.only]
        return [depth for depth in asked if depth <= self.most]

    def kinds(self, made: Directories) -> list[str]:
        """The verifiers it is tried on: its own, and given ones, which are dense."""
        return [*self.verifiers, *(made.given if "dense" in self.verifiers else ())]

    def refused(self) -> list[int]:
        """Depths that are errors: the next ones on both sides, and those of `DEPTHS` that it does not admit."""
        if self.only is not None:
            return [depth for depth in (0, *DEPTHS) if depth != self.only]
        return sorted({0, self.most + 1, *(depth for depth in DEPTHS if depth > self.most)})


def _without_model(method: str, **keys: Any) -> Callable[[Directories, str], dict[str, Any]]:
    return lambda made, kind: {"method": method, **keys}


def _family(family: str) -> Callable[[Directories, str], dict[str, Any]]:
    return lambda made, kind: {"model": made.speculator(family, kind)}


def _model(style: str, **keys: Any) -> Callable[[Directories, str], dict[str, Any]]:
    return lambda made, kind: {"method": "draft_model", "model": made.draft_model(style, kind), **keys}


LAYERS = {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}}
CASES = (
    Case("ngram", _without_model("ngram", prompt_lookup_min=1, prompt_lookup_max=3), "yes", drawn=False),
    Case("ngram_gpu", _without_model("ngram_gpu", prompt_lookup_min=1, prompt_lookup_max=3), "GPU only", drawn=False),
    Case("suffix", _without_model("suffix"), "with arctic-inference", drawn=False),
    Case("draft_model", _model("near"), "yes"),
    Case("draft_model (PARD)", _model("parallel", parallel_drafting=True), "yes (CPU not tried)"),
    Case(
        "draft_model (another vocabulary)",
        _model("another vocabulary", use_heterogeneous_vocab=True),
        "yes (CPU not tried)",
        drawn=False,
        small=None,
    ),
    Case("eagle", _family("eagle"), "yes"),
    Case("eagle3", _family("eagle3"), "yes"),
    Case("eagle3 (peagle)", _family("peagle"), "yes"),
    Case("dflash", _family("dflash"), "yes", most=7),
    Case("dflash (dflash2)", _family("dflash2"), "GPU only", most=7),
    Case("dspark", _family("dspark"), "GPU only", most=7),
    Case(
        "mtp",
        _family("mtp"),
        "yes (CPU: one block, not tried)",
        verifiers=("dense", "mixture of experts", "tied embeddings"),
    ),
    Case(
        "mtp (the verifier's own)",
        _without_model("mtp"),
        "yes (CPU: one block, not tried)",
        verifiers=(NATIVE,),
        small=None,
    ),
    Case(
        "mtp (Gemma 4 assistant)",
        lambda made, kind: {"method": "mtp", "model": made.assistant(kind)},
        "yes (CPU not tried)",
        verifiers=(GEMMA,),
        small=SMALL_GEMMA,
    ),
    Case("medusa", _family("medusa"), "yes (CPU not tried)", most=7),
    Case("mlp_speculator", _family("mlp_speculator"), "no", most=7),
    Case("custom_class", _without_model("custom_class", model=REPEATING), "yes (CPU not tried)", drawn=False),
    Case(
        "extract_hidden_states",
        _without_model("extract_hidden_states", **LAYERS),
        "yes (CPU: with another connector)",
        only=1,
        drawn=False,
        small=None,
    ),
)
BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}


def served(made: Directories, case: Case, kind: str, depth: int, **keys: Any) -> LLM:
    """An LLM that drafts by a method, at a depth."""
    config = {**case.config(made, kind), "num_speculative_tokens": depth, **keys.pop("speculative_config", {})}
    if config.get("method") == "extract_hidden_states":
        connector = {"shared_storage_path": str(made.root / "states")}
        keys["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": connector,
        }
    return LLM(made.verifier(kind), dtype="float32", speculative_config=config, max_model_len=96, **keys)


def differences(asked: Asked, case: Case, depth: int, batch: int) -> list[str]:
    """Where answers with drafts are others than without: in tokens, in text, or in what ended them."""
    llm = served(asked.made, case, asked.kind, depth, max_num_seqs=batch)
    try:
        return asked.differences(asked.told(llm, asked.count_of(batch)))
    finally:
        llm.close()


def refused_depths(made: Directories, case: Case) -> list[int]:
    """The depths that are not admitted and whose error names the key."""
    named = []
    for depth in case.refused():
        try:
            served(made, case, case.verifiers[0], depth)
        except EngineError as error:
            if "num_speculative_tokens" in str(error):
                named.append(depth)
    return named


def sampled_p(
    made: Directories, case: Case, requests: int, depth: int = 3, *, config: Mapping[str, Any] | None = None
) -> float | None:
    """How likely counts as far from the exact law are, of the first four tokens; None where no small draft is there.

    `config` has more keys of `speculative_config`.
    """
    if case.small is None:
        return None
    drawn = {"draft_sample_method": "probabilistic"} if case.drawn else {}
    drawn |= config or {}
    llm = served(made, case, case.small, depth, max_num_seqs=64, speculative_config=drawn)
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH + i % 5, seed=i, ignore_eos=True)
        for i in range(requests)
    ]
    outputs = llm.generate([LAW_PROMPTS[i % 3] for i in range(requests)], params, use_tqdm=False)
    verifier = Verifier.from_pretrained(made.verifier(case.small), dtype="float32")
    statistic, dof = 0.0, 0
    for place, prompt in enumerate(LAW_PROMPTS):
        tokens = torch.tensor([output.outputs[0].token_ids[:LENGTH] for output in outputs[place::3]])
        found, cells, _ = compared(codes(tokens, 3), stock_law(verifier, prompt))
        statistic, dof = statistic + found, dof + cells
    return float(chi2_law.sf(statistic, dof))


@dataclass(frozen=True)
class Row:
    """What was found of a method."""

    method: str
    greedy_lossless: bool
    sampled_p: float | None
    batched: bool
    cpu: bool
    vllm_032: str
    K: list[int]
    verifiers: list[str]

    @property
    def sound(self) -> bool:
        """Whether all that was looked at is as it should be."""
        return self.greedy_lossless and self.batched and (self.sampled_p is None or self.sampled_p >= LEAST)


def examined(made: Directories, case: Case, depths: Sequence[int], requests: int, known: dict[str, Asked]) -> Row:
    """Run the whole matrix of a method."""
    lossless, batched, kinds = True, True, case.kinds(made)
    for kind in kinds:
        asked = known.setdefault(kind, Asked(made, kind))
        for depth in case.depths(depths):
            for batch in BATCHES:
                found = differences(asked, case, depth, batch)
                lossless, batched = lossless and not found, batched and (not found or batch == 1)
                for line in found:
                    print(f"{case.name}: K={depth}, batch {batch}, {kind}: {line}", file=sys.stderr, flush=True)
    admitted, named = case.depths(depths), refused_depths(made, case)
    if named != case.refused():
        raise AssertionError(f"{case.name}: depths {case.refused()} must be refused by name, and {named} were")
    p = sampled_p(made, case, requests)
    return Row(case.name, lossless, p, batched, True, case.vllm_032, admitted, kinds)


# Of one process: requests by the kind of verifier, whose answers all methods are compared with.
_KNOWN: dict[str, Asked] = {}


def _examined_by_name(made: Directories, name: str, depths: Sequence[int], requests: int) -> Row:
    return examined(made, BY_NAME[name], depths, requests, _KNOWN)


def rows_of(made: Directories, names: Sequence[str], args: argparse.Namespace) -> Iterator[Row]:
    """Rows of the methods as they are done, by as many processes as asked for."""
    if args.workers == 1:
        for name in names:
            yield _examined_by_name(made, name, args.depths, args.requests)
        return
    for kind in {SMALL} | {kind for name in names for kind in BY_NAME[name].kinds(made)}:
        made.verifier(kind)
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(_examined_by_name, made, name, args.depths, args.requests) for name in names]
        for task in as_completed(tasks):
            yield task.result()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| method | greedy: same tokens | sampled: same law (p) | batched | CPU | vLLM 0.32 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        p = row["sampled_p"]
        law = "greedy only" if p is None and "vocabulary" in row["method"] else "-" if p is None else f"yes ({p:.2f})"
        if p is not None and p < LEAST:
            law = f"no ({p:.1e})"
        cells = ["yes" if row[name] else "no" for name in ("greedy_lossless", "batched", "cpu")]
        lines.append(f"| {row['method']} | {cells[0]} | {law} | {cells[1]} | {cells[2]} | {row['vllm_032']} |")
    return "\n".join(lines)


def table_in(readme: Path) -> str:
    """What stands between the markers."""
    _, _, rest = readme.read_text(encoding="utf-8").partition(MARKERS[0])
    return rest.partition(MARKERS[1])[0].strip()


def put_into(readme: Path, text: str) -> None:
    """Replace what stands between the markers."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    readme.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("out/methods.json"))
    parser.add_argument("--verifier", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--readme", type=Path)
    args = parser.parse_args()
    if args.readme is not None:
        put_into(args.readme, table(json.loads(args.out.read_text(encoding="utf-8"))))
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    coverage = json.dumps(schema_coverage(), indent=2) + "\n"
    args.out.with_name("schema_coverage.json").write_text(coverage, encoding="utf-8")
    lines = {row["method"]: row for row in json.loads(args.out.read_text())} if args.out.exists() else {}
    given = dict(one.partition("=")[::2] for one in args.verifier)
    sound = True
    with tempfile.TemporaryDirectory() as root:
        for row in rows_of(Directories(Path(root), given), args.methods, args):
            print(row, flush=True)
            lines[row.method], sound = asdict(row), sound and row.sound
            kept = [lines[other] for other in BY_NAME if other in lines]
            args.out.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    if args.against is not None and _NUMBER.sub("", table_in(args.against)) != _NUMBER.sub("", table(kept)):
        print(f"the table of {args.against} is another than:\n{table(kept)}", file=sys.stderr)
        sound = False
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
