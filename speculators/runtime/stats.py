"""Counts of speculative decoding; every rate is derived from sums, as vLLM derives it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpecDecodeStats:
    """What verification steps did, for one request or a whole run.

    A step counts when it verified at least one drafted token. Accepted tokens are counted before an end of sequence, a
    stop string or the length limit truncates the output; the bonus token is never counted. Of a tree, the
    drafted tokens are those of its longest path, as no more can be accepted: one a level.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_per_position = self.accepted_per_position or [0] * self.num_spec_tokens
        self.drafted_per_position = self.drafted_per_position or [0] * self.num_spec_tokens

    def add_step(self, drafted: int, accepted: int, *, keep_steps: bool = False) -> None:
        """Count one verification of `drafted` tokens of which the first `accepted` were kept."""
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for position in range(drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted
        if keep_steps:
            self.per_step_accepted.append(accepted)
            self.per_step_drafted.append(drafted)

    @property
    def acceptance_length(self) -> float:
        """Mean output tokens a verification: 1 + accepted / drafts; 1 when nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of counted steps that accepted position i."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position]

    @property
    def conditional_acceptance_per_position(self) -> list[float]:
        """Share of steps that accepted position i among those that accepted position i - 1."""
        before = [self.num_drafts, *self.accepted_per_position[:-1]]
        return [now / base if base else 0.0 for now, base in zip(self.accepted_per_position, before, strict=True)]

    @property
    def acceptance_histogram(self) -> list[int]:
        """Number of steps that accepted exactly 0, 1, .., K drafts."""
        at_least = [self.num_drafts, *self.accepted_per_position, 0]
        return [at_least[i] - at_least[i + 1] for i in range(self.num_spec_tokens + 1)]

    def to_dict(self, *, detailed: bool = False) -> dict[str, Any]:
        """vLLM's per-request field names; `detailed` adds the per-step lists when there was a step."""
        fields: dict[str, Any] = {
            "mean_acceptance_length": self.acceptance_length,
            "draft_acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": self.acceptance_histogram,
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if detailed and self.num_drafts:
            fields["per_step_accepted"] = list(self.per_step_accepted)
            fields["per_step_drafted"] = list(self.per_step_drafted)
        return fields
