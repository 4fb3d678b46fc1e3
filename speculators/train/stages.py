"""The stages of a recipe. Each can be run alone, goes on where it stopped, and is skipped once it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from speculators.errors import UsageError, VerifierError
from speculators.extract import run as extraction
from speculators.extract.conversations import as_sources, read_conversations
from speculators.extract.fingerprint import verifier_directory
from speculators.extract.manifest import MANIFEST, Manifest
from speculators.extract.prepared import PreparedData
from speculators.extract.regenerate import RegenerateOptions
from speculators.extract.sources import Source
from speculators.extract.sourcing import ExtractOptions, launched_device, launched_share
from speculators.extract.store import WorkShare
from speculators.formats.card import write_card
from speculators.formats.config import SpeculatorConfig
from speculators.formats.files import write_text
from speculators.formats.hub import cached_directory, is_local, resolve
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.draft_model import DraftModel, SampleSource
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.runtime.engine import EngineLimits
from speculators.runtime.evaluate import EvaluateOptions, evaluate, plot_report, write_report
from speculators.runtime.fetch import COMPLETE, FETCHERS, FOLDER, cache_folder, fetch_verifier
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier, default_device
from speculators.train.curves import draw_curves
from speculators.train.dataset import Rows, split_rows
from speculators.train.journal import Journal, file_digest, wait_until
from speculators.train.loop import TrainingTask, TrainResult, train
from speculators.train.outputs import Outputs
from speculators.train.samples import open_samples, origin, require_free_mask_token, samples_identity
from speculators.train.starting import make_speculator, require_possible_start, start_identity, takes_vocabulary
from speculators.train.threads import cpu_threads, usable_cores
from speculators.train.tracking import require_trackers

if TYPE_CHECKING:
    from speculators.train.recipe import Recipe


class Run:
    """One execution of a recipe; `progress` shows bars and tables on standard error.

    Of several processes, all extract and train; the first alone does the rest, and shows it.
    """

    def __init__(self, recipe: Recipe, *, progress: bool = True) -> None:
        self.recipe = recipe
        self.outputs = Outputs(Path(recipe.out))
        self.share = launched_share(os.environ)
        self.leads = self.share.rank == 0
        self.progress = progress and self.leads
        self.journal = Journal(self.outputs.out, leads=self.leads)

    def run(self, stages: Sequence[str]) -> None:
        """Run some stages in their order.

        Before any of them: UsageError for a tracker that is not installed or a loss without the kernel that is asked
        for, TrainingError for a way of carrying out training that this machine lacks.
        """
        if "train" in stages:
            require_trackers(self.recipe.train.trackers)
            self._require_possible_training()
        threads = cpu_threads(self.recipe.threads, os.environ, usable_cores())
        if threads is not None:
            torch.set_num_threads(threads)
        console = Console(stderr=True, quiet=not self.progress)
        require_possible_start(self.recipe.warm_start, self.speculator_config)
        if self.leads:
            settings = json.dumps(self.recipe.model_dump(mode="json"), indent=2)
            write_text(self.outputs.out / "recipe.json", settings + "\n")
        for name in STAGES:
            if name in stages:
                before = self.journal.timings().get(name)
                worked = STAGES[name](self)
                seconds = self.journal.timings().get(name, 0.0)
                what = f"{seconds:.0f} s" if worked else "complete already" if before is not None else "nothing to do"
                console.print(f"{name}: {what}", highlight=False)

    def _require_possible_training(self) -> None:
        execution = self.recipe.train.execution()
        execution.require_possible(default_device())
        objective: Any = self.recipe.objective
        objective.require_possible(execution)

    def plan(self, stages: Sequence[str]) -> dict[str, Any]:
        """The resolved settings; of the verifier its config.json alone is read, where it is on this machine.

        Where it is not, `unresolved` says so instead of `speculator`.
        """
        found: dict[str, Any] = {"speculator": None}
        directory = self.verifier_here or cached_directory(self.recipe.verifier)
        if directory is None:
            found["unresolved"] = (
                f"the config.json of {self.recipe.verifier} is not on this machine; give verifier=FOLDER that has it, "
                "or run a stage, which fetches it"
            )
        else:
            config = self._resolved(directory)
            require_possible_start(self.recipe.warm_start, config, offline=True)
            found["speculator"] = config.to_json()
        return {"stages": list(stages), "recipe": self.recipe.model_dump(mode="json"), **found}

    @cached_property
    def verifier_here(self) -> Path | None:
        """The verifier's folder where it needs no download."""
        name = self.recipe.verifier
        if Path(name).expanduser().is_dir():
            return Path(name).expanduser().resolve()
        if name in FETCHERS:
            fetched = cache_folder() / "verifiers" / FOLDER
            return fetched.resolve() if (fetched / COMPLETE).is_file() else None
        return None

    @cached_property
    def verifier(self) -> str:
        """What the verifier is loaded by: an absolute folder, or a hub id."""
        if self.verifier_here is None and self.recipe.verifier in FETCHERS:
            return str(fetch_verifier(self.recipe.verifier).resolve())
        if self.verifier_here is None and is_local(self.recipe.verifier):
            raise VerifierError(f"verifier {self.recipe.verifier!r} is no folder; check the path in the recipe")
        return str(self.verifier_here or self.recipe.verifier)

    @cached_property
    def speculator_config(self) -> SpeculatorConfig:
        """The draft's options, completed with the verifier's shape."""
        return self._resolved(self.verifier_here or verifier_directory(self.verifier))

    def _resolved(self, directory: Path) -> SpeculatorConfig:
        name = str(directory) if self.verifier_here is not None else self.verifier
        try:
            shape = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise VerifierError(f"the config.json of verifier {name!r} cannot be read: {error}") from error
        options: Any = self.recipe.draft
        config: SpeculatorConfig = options.resolve(VerifierShape.from_config_dict(shape, name))
        return config

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens that the data chooses for a reduced draft vocabulary; None where the draft has one without that."""
        config = self.speculator_config
        return (
            None
            if takes_vocabulary(self) or config.num_draft_ids == config.verifier_vocab_size
            else config.num_draft_ids
        )

    @property
    def extract_options(self) -> ExtractOptions:
        """How this process gets hidden states."""
        return replace(self.recipe.extract.options(), device=launched_device(os.environ))

    @property
    def conversations(self) -> list[Source]:
        """What the rows are made of."""
        if self.recipe.regenerate.prompts:
            return [Source(str(self.outputs.conversations))]
        return as_sources(self.recipe.data.train)


def regenerate(run: Run) -> bool:
    """Prompts to conversations by the verifier."""
    options = run.recipe.regenerate
    if not options.prompts:
        return False
    prompts, template_options = as_sources(options.prompts), run.recipe.data.template_options
    inputs = {
        "verifier": run.verifier,
        "prompts": [digest for source in prompts for digest in _digests(source)],
        **options.model_dump(mode="json", exclude={"prompts", "max_num_seqs"}),
        **({"template_options": template_options} if template_options else {}),
    }
    with run.journal.stage("regenerate", inputs, [run.outputs.conversations]) as due:
        if due:
            how = RegenerateOptions(
                max_new_tokens=options.max_new_tokens,
                temperatures=options.temperatures,
                seed=options.seed,
                limit=options.limit,
                template_options=template_options,
            )
            extraction.regenerate(
                run.verifier,
                prompts,
                run.outputs.conversations,
                how,
                progress=run.progress,
                dtype=options.dtype,
                max_num_seqs=options.max_num_seqs,
            )
    return due


def prepare_data(run: Run) -> bool:
    """Conversations to rows and, where the draft's vocabulary is reduced, the tokens that it keeps."""
    options = run.recipe.data
    sources = run.conversations
    inputs = {
        "verifier": run.verifier,
        "files": [digest for source in sources for digest in _digests(source)],
        "draft_vocab_size": run.draft_vocab_size,
        **options.model_dump(mode="json", exclude={"train", "validation_rows"}),
    }
    with run.journal.stage("prepare-data", inputs, [run.outputs.prepared]) as due:
        if due:
            how = extraction.PrepareOptions(
                max_length=options.max_length,
                turns=options.turns,
                template_options=options.template_options,
                limit=options.limit,
                match=options.match,
                draft_vocab_size=run.draft_vocab_size,
            )
            extraction.prepare(run.verifier, sources, run.outputs.prepared, how, progress=run.progress)
    return due


def _digests(source: Source) -> list[Any]:
    """What tells a source's content apart from another's."""
    found: list[Any] = [file_digest(path) for path in source.files()] or source.identity()
    return found if source.weight == 1 else [*found, source.weight]


# What makes no other states.
_HOW_TO_ASK = {"online", "endpoints", "served_model", "concurrency", "vllm_python"}


def extract(run: Run) -> bool:
    """Rows to the verifier's hidden states, unless they are made while training."""
    options, layers = run.recipe.extract, run.speculator_config.aux_layer_ids
    require_free_mask_token(run)
    if options.online:
        return False
    inputs = {
        "verifier": run.verifier,
        "rows": PreparedData(run.outputs.prepared).rows_hash,
        "layers": layers,
        **options.model_dump(mode="json", exclude=_HOW_TO_ASK),
    }
    with run.journal.stage("extract", inputs, [run.outputs.states], together=True) as due:
        if due:
            where = run.outputs
            # An engine of vLLM takes all accelerators for itself.
            alone = options.source == "vllm"
            if run.leads or not alone:
                share = WorkShare() if alone else run.share
                how = replace(run.extract_options, share=share)
                extraction.extract_share(run.verifier, where.prepared, where.states, layers, how, progress=run.progress)
            # Others may still be at their shares.
            wait_until(lambda: (where.states / MANIFEST).is_file() and Manifest.read(where.states).is_complete)
    return due


def train_draft(run: Run) -> bool:
    """Hidden states to a speculator: the best checkpoint by acceptance length."""
    recipe, outputs, config, identity = run.recipe, run.outputs, run.speculator_config, samples_identity(run)
    settings = {
        "speculator": config.to_json(),
        "objective": recipe.objective.model_dump(mode="json"),
        "store": origin(run, identity),
        "validation_rows": recipe.data.validation_rows,
        **start_identity(run),
    }
    inputs = {**settings, "train": recipe.train.model_dump(mode="json")}
    with run.journal.stage("train", inputs, [outputs.speculator, outputs.training], together=True) as due:
        if due:
            with open_samples(run, identity) as samples:
                _train(run, samples, settings)
    return due


def _train(run: Run, samples: SampleSource, settings: dict[str, Any]) -> None:
    recipe, outputs, config = run.recipe, run.outputs, run.speculator_config
    training, validation = split_rows(samples, recipe.data.validation_rows, seed=recipe.train.seed)
    weights = load_verifier_weights(resolve(run.verifier))
    speculator = make_speculator(run, weights)
    objective: Any = recipe.objective
    if recipe.warm_start is not None:
        objective = objective.for_trained_draft()
    task = TrainingTask(
        draft=speculator.draft,
        objective=objective,
        verifier_head=VerifierHead.from_weights(weights),
        samples=training,
        validation=validation,
        measure=_measurement(run, config, validation),
        settings=settings,
    )
    result = train(task, recipe.train, outputs.out, show_progress=run.progress)
    if run.leads:
        speculator.save_pretrained(outputs.speculator)
        draw_curves(outputs.out / "metrics.jsonl", outputs.out / "curves.png")
        write_text(outputs.training, json.dumps(_summary(result, len(training)), indent=2) + "\n")


def evaluate_speculator(run: Run) -> bool:
    """The speculator's acceptance, speed and identity on held-out prompts."""
    options, outputs = run.recipe.evaluate, run.outputs
    alone = len(options.data) == 1
    worked = False
    for name, file in options.data.items():
        report = outputs.evaluation(name, alone)
        inputs = {
            "verifier": run.verifier,
            "speculator": [file_digest(path) for path in sorted(outputs.speculator.glob("*.safetensors"))],
            "prompts": file_digest(Path(file)),
            **options.model_dump(mode="json", exclude={"data"}),
        }
        with run.journal.stage("evaluate" if alone else f"evaluate-{name}", inputs, [report]) as due:
            if due:
                _evaluate_on(run, Path(file), report)
        worked = worked or due
    return worked


def _evaluate_on(run: Run, prompts: Path, report: Path) -> None:
    options = run.recipe.evaluate
    rows = read_conversations(prompts, options.limit, options.match)
    conversations = [row.first_turn for row in rows]
    verifier = Verifier.from_pretrained(run.verifier, dtype=options.dtype)
    speculator = Speculator.from_pretrained(run.outputs.speculator)
    how = EvaluateOptions(
        num_speculative_tokens=options.num_speculative_tokens,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        max_num_seqs=options.max_num_seqs,
    )
    name = str(run.outputs.speculator)
    found = evaluate(verifier, speculator, conversations, how, speculator_name=name, show=run.progress)
    plot_report(found, report.with_suffix(".png"))
    write_report(found, report)


def write_model_card(run: Run) -> bool:
    """The measured numbers as README.md of the speculator."""
    outputs, names = run.outputs, run.recipe.evaluate.data
    files = {name: outputs.evaluation(name, len(names) == 1) for name in names}
    missing = next((path for path in files.values() if not path.exists()), None)
    if missing is not None:
        raise UsageError(f"{missing} is not there; run the stage evaluate before the stage card")
    inputs = {"evaluations": {name: file_digest(path) for name, path in files.items()}}
    inputs["training"] = {"training.json": file_digest(outputs.training)}
    with run.journal.stage("card", inputs, [outputs.speculator / "README.md"]) as due:
        if due:
            found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}
            training = json.loads(outputs.training.read_text(encoding="utf-8"))
            write_card(outputs.speculator, run.speculator_config, found, training)
    return due


STAGES: Mapping[str, Callable[[Run], bool]] = {
    "regenerate": regenerate,
    "prepare-data": prepare_data,
    "extract": extract,
    "train": train_draft,
    "evaluate": evaluate_speculator,
    "card": write_model_card,
}


def _measurement(run: Run, config: SpeculatorConfig, validation: Rows) -> Callable[[DraftModel], float] | None:
    """Decode the prompts of the first validation rows with a draft, greedily, through the loop that serves."""
    options = run.recipe.train
    prompts = [prompt for row in range(len(validation)) if (prompt := validation.prompt(row))]
    prompts = prompts[: options.measure_prompts]
    if not prompts:
        return None
    # Among several processes the first one decodes.
    verifier = Verifier.from_pretrained(run.verifier) if run.leads else None
    sampling = SamplingParams(temperature=0.0, max_tokens=options.measure_tokens)

    def measure(draft: DraftModel) -> float:
        assert verifier is not None
        room = min(verifier.max_length or 2**31, max(map(len, prompts)) + options.measure_tokens)
        limits = EngineLimits(max_num_seqs=min(len(prompts), 8), max_model_len=room)
        llm = LLM.from_parts(verifier, Speculator(config, draft), limits=limits)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        assert llm.stats is not None
        return llm.stats.acceptance_length

    return measure


def _summary(result: TrainResult, num_rows: int) -> dict[str, Any]:
    return {
        "rows": num_rows,
        "optimizer_steps": result.steps,
        "trained_tokens": result.tokens,
        "tokens_per_second": result.tokens_per_second,
        "row_utilisation": result.utilisation,
        "chosen_step": result.chosen.step,
        "measured_acceptance_length": result.chosen.scores.get("measured"),
        "loss": result.chosen.scores.get("loss"),
    }
