"""A recipe: everything that a run does, as typed Python.

    RECIPE = Recipe(name="mine", verifier="smollm2", family="...", train=TrainConfig(epochs=3))
    if __name__ == "__main__":
        run(RECIPE)

makes a script for `accelerate launch recipe.py [stage ...] [key=value ...]`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SerializeAsAny, model_validator

from speculators.errors import SpeculatorsError, UsageError
from speculators.extract.remote import ServerOptions
from speculators.extract.sourcing import ExtractOptions, SourceName
from speculators.extract.vllm_engine import VllmOptions
from speculators.models import FAMILIES
from speculators.train.config import Section, TrainConfig, as_tuple
from speculators.train.overrides import apply_overrides
from speculators.train.stages import STAGES, Run


def _as_pattern(value: str | None) -> str | None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from error
    return value


Files = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Pattern = Annotated[str | None, AfterValidator(_as_pattern)]


class RegenerateConfig(Section):
    """Answers by the verifier; without `prompts` the stage has nothing to do and `data.train` must have answers.

    `temperatures` are (value, share) pairs; 0.0 is greedy.
    """

    prompts: Files = ()
    max_new_tokens: int = Field(default=256, ge=1)
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    seed: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1, description="prompts answered; all where not given")
    dtype: str = "auto"
    max_num_seqs: int = Field(default=32, ge=1, description="conversations under way at once")


class DataConfig(Section):
    """Conversations as rows; `train` is not read where conversations are regenerated, by the same template options.

    Each name in `train` is a file, a folder, a saved dataset or `hf:owner/name[:subset[:split]]`, with `@0.3` behind it
    for that share of its rows.

    The last `validation_rows` rows of a fixed shuffle are held back from training: their loss and the acceptance length
    on their prompts choose the checkpoint.
    """

    train: Files = ()
    max_length: int = Field(default=1024, ge=2, description="tokens of a row; longer ones are cut and counted")
    turns: Literal["all", "last"] = "all"
    template_options: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template by name")
    limit: int | None = Field(default=None, ge=1, description="rows read; all where not given")
    match: Pattern = Field(default=None, description="regular expression found in the ids of the rows that are read")
    validation_rows: int = Field(default=64, ge=0)


class ExtractConfig(Section):
    """Hidden states of the verifier: `dtype` computes them, `store_dtype` keeps them.

    `aux_dtype` quantises all layers but the last, which takes a third off the store. With `online` states are made
    while training, by a source that stays open, and nothing is stored.
    """

    source: SourceName = "local"
    online: bool = False
    endpoints: Files = Field(default=(), description="the servers of source server, like http://127.0.0.1:8000/v1")
    served_model: str | None = Field(default=None, description="what the servers call the verifier, else the first")
    concurrency: int = Field(default=16, ge=1, description="requests at a time, to all servers")
    vllm_python: str | None = Field(default=None, description="the Python that has vLLM (source vllm), else this one")
    vllm_keywords: dict[str, Any] = Field(default_factory=dict, description="of vLLM's LLM: tensor_parallel_size ...")
    files: str | None = Field(default=None, description="the folder of per-request files (source files)")
    file_layer_ids: tuple[int, ...] | None = Field(default=None, description="the layers of files that do not say")
    skip_failed: bool = Field(default=False, description="leave out rows that no states can be had for")
    dtype: str = "auto"
    store_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    aux_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    batch_tokens: int = Field(default=4096, ge=1, description="tokens of a pass")

    @model_validator(mode="after")
    def _source_is_complete(self) -> Self:
        try:
            self.options()
        except UsageError as error:
            raise ValueError(str(error)) from error
        if self.online and self.skip_failed and self.source != "files":
            raise ValueError(
                "skip_failed cannot be had with online: which rows have no states is known when they are trained on"
            )
        return self

    def options(self) -> ExtractOptions:
        """What the extraction is told; UsageError where the source lacks something."""
        server = None
        if self.endpoints:
            server = ServerOptions(
                self.endpoints, self.served_model, concurrency=self.concurrency, server_layer_ids=self.file_layer_ids
            )
        python = None if self.vllm_python is None else Path(self.vllm_python)
        return ExtractOptions(
            source=self.source,
            server=server,
            vllm=VllmOptions(python=python, keywords=self.vllm_keywords),
            files=None if self.files is None else Path(self.files),
            file_layer_ids=self.file_layer_ids,
            skip_failed=self.skip_failed,
            dtype=self.dtype,
            store_dtype=self.store_dtype,
            aux_dtype=self.aux_dtype,
            batch_tokens=self.batch_tokens,
        )


class EvaluateConfig(Section):
    """Measurements of the finished speculator.

    `data` maps a name to a file of prompts; with one name the result is `evaluation.json`, with several
    `evaluation_<name>.json`.
    """

    data: dict[str, str] = Field(default_factory=dict)
    num_speculative_tokens: int | None = Field(default=None, ge=1, description="the speculator's own where not given")
    max_new_tokens: int = Field(default=96, ge=1)
    limit: int | None = Field(default=None, ge=1, description="prompts of each file")
    match: Pattern = Field(default=None, description="regular expression found in the ids of the prompts")
    max_num_seqs: int = Field(default=1, ge=1, description="prompts under way at once; speeds are those of this batch")
    temperature: float = Field(default=0.0, ge=0)
    dtype: str = "auto"


class Recipe(Section):
    """A run from prompts to a measured speculator.

    `verifier` is a folder, a hub id, or the name of one that can be fetched ("smollm2"). `draft` and `objective` are
    the family's options, as its own classes or as plain dicts, its defaults where not given. `warm_start` is a trained
    speculator, a folder or a hub id, of this family or of one that it goes on from: its weights and its vocabulary map
    are where the draft starts. "verifier" starts from the block that the verifier's own checkpoint has; without
    `warm_start` the draft is drawn from `train.seed`. Everything is written below `out` ("out/<name>" where not given).
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    verifier: str = Field(min_length=1)
    family: str
    # Without a value these are filled from the family before anything else happens.
    draft: SerializeAsAny[BaseModel] = Field(default_factory=Section)
    objective: SerializeAsAny[BaseModel] = Field(default_factory=Section)
    warm_start: str | None = Field(default=None, min_length=1)
    regenerate: RegenerateConfig = RegenerateConfig()
    data: DataConfig = DataConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    threads: int | None = Field(default=None, ge=1, description="CPU threads; see `threads.cpu_threads`")
    out: str = ""

    @model_validator(mode="before")
    @classmethod
    def _options_of_the_family(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("family") not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            family = given.get("family") if isinstance(given, Mapping) else given
            raise ValueError(f"family is {family!r}; expected one of {known}")
        family = FAMILIES[given["family"]]
        options = {"draft": family.draft, "objective": family.objective}
        filled = dict(given)
        for key, kind in options.items():
            value = given.get(key, {})
            filled[key] = kind(**value) if isinstance(value, Mapping) else value
            if not isinstance(filled[key], kind):
                raise ValueError(f"{key} is a {type(value).__name__}; family {family.name!r} takes {kind.__name__}")
        filled["out"] = given.get("out") or f"out/{given.get('name')}"
        return filled

    @model_validator(mode="after")
    def _has_conversations(self) -> Self:
        if not self.data.train and not self.regenerate.prompts:
            raise ValueError(
                "neither data.train nor regenerate.prompts names a file; expected conversations or prompts"
            )
        return self


def run(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Act as a script: `[stage ...] [key=value ...] [--plan]`; ends the process with an exit code where work fails.

    Without a stage all are run, in order; each goes on where it stopped, and one that is complete is skipped. `--plan`
    prints the resolved settings as JSON and loads no weights.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _act(recipe, sys.argv[1:] if argv is None else argv)
    except SpeculatorsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: what is finished is kept; the same command goes on from there\n")
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def _act(recipe: Recipe, argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=f"Recipe {recipe.name}: {recipe.family} for {recipe.verifier}.")
    parser.add_argument("words", nargs="*", metavar="stage | key=value", help=f"stages: {', '.join(STAGES)}, all")
    parser.add_argument("--plan", action="store_true", help="print the resolved settings as JSON and end")
    given = parser.parse_intermixed_args(list(argv))
    names = [word for word in given.words if "=" not in word]
    for name in names:
        if name not in (*STAGES, "all"):
            nearest = difflib.get_close_matches(name, [*STAGES, "all"], n=1, cutoff=0.0)[0]
            raise UsageError(f"there is no stage {name!r}; did you mean {nearest}? Stages: {', '.join(STAGES)}, all")
    wanted = [stage for stage in STAGES if not names or stage in names or "all" in names]
    work = Run(apply_overrides(recipe, [word for word in given.words if "=" in word]))
    if given.plan:
        sys.stdout.write(json.dumps(work.plan(wanted), indent=2) + "\n")
        return
    work.run(wanted)


def _end(signum: int, _: FrameType | None) -> None:
    sys.exit(128 + signum)
