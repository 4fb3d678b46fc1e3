"""Stored samples as packed batches."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.errors import TrainingError
from speculators.models.draft_model import PackedBatch, Sample, SampleSource
from speculators.train.packing import PackingPlan, deal, plan_rows, split_steps


class Rows:
    """Some samples of a source, by their numbers there."""

    def __init__(self, source: SampleSource, numbers: Sequence[int]) -> None:
        self._source = source
        self._numbers = list(numbers)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample."""
        lengths = self._source.lengths
        return [lengths[number] for number in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Sample:
        return self._source[self._numbers[index]]

    def number(self, index: int) -> int:
        """What a sample's number in the source is."""
        return self._numbers[index]

    def prompt(self, index: int) -> list[int]:
        """Token ids before the first that the verifier wrote."""
        sample = self[index]
        first = int(sample.loss_mask.int().argmax())
        prompt: list[int] = sample.input_ids[:first].tolist()
        return prompt


def split_rows(source: SampleSource, validation_rows: int, *, seed: int) -> tuple[Rows, Rows]:
    """Samples to train on and samples held back; which are which depends on their number and the seed alone.

    TrainingError where nothing would be left to train on.
    """
    if validation_rows >= len(source):
        raise TrainingError(
            f"{validation_rows} of {len(source)} rows are to be held back; give more data or lower data.validation_rows"
        )
    order = list(range(len(source)))
    random.Random(f"{seed}/validation").shuffle(order)
    trained = len(order) - validation_rows
    return Rows(source, sorted(order[:trained])), Rows(source, order[trained:])


# A process's share of a step: the rows of each of its forward passes, and how many of them count.
Share = tuple[list[list[int]], int]


@dataclass(frozen=True)
class Passes:
    """A process's forward passes of a step: the numbers of their rows, the rows, and how many of them count.

    `waited` are the seconds that it took to have them.
    """

    rows: list[list[int]]
    batches: list[PackedBatch]
    counting: int
    waited: float

    @property
    def num_tokens(self) -> int:
        """Tokens of the passes that count, padding left out."""
        return sum(batch.num_tokens for batch in self.batches[: self.counting])


class PackedRows:
    """Samples packed to rows of `row_length`, epoch by epoch.

    Batches keep the dtype that the states are stored in. TrainingError where there is no sample at all.
    """

    def __init__(self, source: SampleSource, row_length: int, *, seed: int = 0, window: int = 512) -> None:
        if len(source) == 0:
            raise TrainingError("the hidden-states store holds no sample; expected at least one to train on")
        self.source = source
        self.row_length = row_length
        self._seed = seed
        self._window = window
        self._plans: dict[int, PackingPlan] = {}

    def plan(self, epoch: int) -> PackingPlan:
        """The rows of an epoch (from 0)."""
        if epoch not in self._plans:
            self._plans[epoch] = plan_rows(
                self.source.lengths, self.row_length, seed=self._seed, epoch=epoch, window=self._window
            )
        return self._plans[epoch]

    def steps(self, epoch: int, rows_per_step: int, accumulation: int) -> list[list[list[int]]]:
        """Row numbers of an epoch's steps, `[step][pass][row]`."""
        return split_steps(len(self.plan(epoch).rows), rows_per_step, accumulation)

    def dealt(self, epoch: int, rows_per_step: int, accumulation: int, rank: int, world_size: int) -> list[Share]:
        """One process's share of each step of an epoch, all processes making `accumulation` passes in a full step."""
        documents = [len(row) for row in self.plan(epoch).rows]
        return deal(self.steps(epoch, rows_per_step, accumulation * world_size), documents, rank, world_size)

    def passes(
        self, epoch: int, shares: Sequence[Share], device: torch.device, *, prefetch: bool = True
    ) -> Iterator[Passes]:
        """The forward passes of some steps of an epoch, loaded as `step_batches` does."""
        loaded = self.step_batches(epoch, [rows for rows, _ in shares], device, prefetch=prefetch)
        for rows, counting in shares:
            started = time.perf_counter()
            batches = next(loaded)
            yield Passes(rows, batches, counting, time.perf_counter() - started)

    def batch(self, epoch: int, rows: Sequence[int]) -> PackedBatch:
        """Load some rows of an epoch."""
        plan = self.plan(epoch)
        documents = [[(number, self.source[number]) for number in plan.rows[row]] for row in rows]
        return collate(documents, self.row_length)

    def step_batches(
        self, epoch: int, steps: Sequence[Sequence[Sequence[int]]], device: torch.device, *, prefetch: bool = True
    ) -> Iterator[list[PackedBatch]]:
        """The passes of each step on `device`, hidden states in float32.

        With `prefetch` a thread reads one step ahead. What it reads depends on its arguments alone, so that a run which
        stops and resumes sees the same batches.
        """

        def load(step: Sequence[Sequence[int]]) -> list[PackedBatch]:
            return [self.batch(epoch, rows).to(device, torch.float32) for rows in step]

        if not prefetch:
            yield from map(load, steps)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
            ahead = [reader.submit(load, step) for step in steps[:1]]
            for following in [*steps[1:], None]:
                if not ahead:
                    return
                ready = ahead.pop().result()
                if following is not None:
                    ahead.append(reader.submit(load, following))
                yield ready


def collate(rows: Sequence[Sequence[tuple[int, Sample]]], row_length: int) -> PackedBatch:
    """Lay numbered samples one after another into rows, padded to the fullest of them.

    Each row holds at most `row_length` tokens; only a sample that is alone in its row may be longer, and is cut there.
    """
    filled = [[(number, _cut(sample, row_length)) for number, sample in row] for row in rows]
    width = max(sum(len(sample.input_ids) for _, sample in row) for row in filled)
    if width > row_length:
        raise TrainingError(f"a row of {width} tokens was planned; rows hold {row_length}")
    features = next(sample for row in filled for _, sample in row)
    batch, aux = len(filled), features.aux_hidden_states.shape[1] * features.aux_hidden_states.shape[2]
    packed = PackedBatch(
        input_ids=torch.zeros(batch, width, dtype=torch.int64),
        loss_mask=torch.zeros(batch, width, dtype=torch.bool),
        aux_hidden_states=features.aux_hidden_states.new_zeros(batch, width, aux),
        last_hidden_states=features.last_hidden_states.new_zeros(batch, width, features.last_hidden_states.shape[-1]),
        document_ids=torch.full((batch, width), -1, dtype=torch.int64),
        position_ids=torch.zeros(batch, width, dtype=torch.int64),
    )
    for row, samples in enumerate(filled):
        start = 0
        for number, sample in samples:
            end = start + len(sample.input_ids)
            packed.input_ids[row, start:end] = sample.input_ids
            packed.loss_mask[row, start:end] = sample.loss_mask
            packed.aux_hidden_states[row, start:end] = sample.aux_hidden_states.flatten(1)
            packed.last_hidden_states[row, start:end] = sample.last_hidden_states
            packed.document_ids[row, start:end] = number
            packed.position_ids[row, start:end] = torch.arange(end - start)
            start = end
    return packed


def _cut(sample: Sample, length: int) -> Sample:
    def head(tensor: Tensor) -> Tensor:
        return tensor[:length]

    return Sample(
        head(sample.input_ids),
        head(sample.loss_mask),
        head(sample.aux_hidden_states),
        head(sample.last_hidden_states),
    )
