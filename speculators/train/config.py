"""The settings of training: typed, strict, and free of torch, so that a plan can be printed without loading it."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from speculators.models.execution import AttentionKernel, Execution, LossKernel

OptimizerName = Literal["adamw", "muon"]
Orthogonalisation = Literal["newton_schulz", "polar_express"]
ScheduleName = Literal["linear", "cosine", "constant", "wsd"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
Strategy = Literal["auto", "ddp", "fsdp2"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


def as_tuple(value: object) -> object:
    """One word, or a list of them, as the tuple that is meant."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A part of a recipe: unknown keys and values of another type are refused, and nothing changes after it is made."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


class TrainConfig(Section):
    """How a draft is trained.

    A step is an optimizer step: `accumulation` forward passes of `rows_per_step` packed rows each, and on every
    process. Parameters, gradients and moments are float32 whatever `compute_dtype` says; that one only chooses what the
    matrix products run in ("auto": bfloat16 where the hardware multiplies it, else float32).
    """

    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1, description="ends the run early; the schedule ends there too")
    row_length: int = Field(default=1024, ge=2, description="tokens of a packed row; longer documents are cut")
    rows_per_step: int = Field(default=1, ge=1, description="packed rows of one forward pass")
    accumulation: int = Field(default=1, ge=1, description="forward passes of one optimizer step")
    pack_window: int = Field(default=512, ge=1, description="documents that are shuffled and fitted into rows together")
    prefetch: bool = Field(default=True, description="read the next step's rows in a thread")

    optimizer: OptimizerName = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0)
    norm_rate: float = Field(default=1.0, gt=0, description="times the rate, for norms and other vectors")
    head_rate: float = Field(default=1.0, gt=0, description="times the rate, for heads and embeddings that are trained")
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = Field(default=0.95, ge=0, lt=1, description="of Muon")
    orthogonalisation: Orthogonalisation = Field(
        default="newton_schulz",
        description="of Muon: one polynomial for all iterations, as torch has it, or the best for each: polar_express",
    )
    ns_steps: int = Field(default=5, ge=1, lt=100, description="iterations of Muon's orthogonalisation")
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    schedule: ScheduleName = "cosine"
    decay_ratio: float = Field(default=0.2, gt=0, le=1, description="share of the steps that wsd decays over")
    clip_norm: float = Field(default=0.5, gt=0)
    max_skipped_steps: int = Field(
        default=3, ge=0, description="steps with a NaN or infinite gradient before giving up"
    )
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="judge and keep a moving average of the weights instead of the last ones"
    )
    compute_dtype: ComputeDtype = "auto"
    strategy: Strategy = Field(
        default="auto",
        description="how several processes hold the draft and the verifier's head: whole (ddp) or in parts (fsdp2)",
    )
    seed: int = Field(default=0, ge=0)
    gradient_checkpointing: bool = Field(
        default=False, description="keep the inputs of each layer alone, and run it again in the backward"
    )
    compile: bool = Field(default=False, description="compile the parts of layers with torch.compile")
    attention: AttentionKernel = Field(
        default="auto", description="blocks of scores, anywhere; flex, fused, on a GPU; auto is flex on a GPU"
    )
    losses: LossKernel = Field(
        default="auto",
        description="torch's operations, anywhere; triton's kernels, on a GPU; auto is what is measured to be faster",
    )

    checkpoint_every: int = Field(default=500, ge=1, description="steps")
    keep_last: int = Field(default=1, ge=1, description="newest checkpoints kept")
    keep_best: int = Field(default=1, ge=1, description="checkpoints kept by acceptance length, and as many by loss")
    measure_every: int | None = Field(default=None, ge=1, description="steps; without it at the end of each epoch")
    measure_prompts: int = Field(default=16, ge=0, description="prompts decoded per measurement; 0 measures loss only")
    measure_tokens: int = Field(default=64, ge=1, description="new tokens per prompt")
    log_every: int = Field(default=1, ge=1, description="steps between lines of metrics.jsonl")
    trackers: Annotated[tuple[TrackerName, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="where the lines of metrics.jsonl are reported too, through accelerate"
    )
    count_flops: bool = Field(default=True, description="count the first step's operations, which mfu is made of")

    @model_validator(mode="after")
    def _betas_are_shares(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}; both must lie in [0, 1)")
        return self

    def execution(self) -> Execution:
        """How forwards are carried out."""
        return Execution(self.gradient_checkpointing, self.compile, self.attention, self.losses)

    def fixed_by_a_checkpoint(self) -> dict[str, object]:
        """The settings that a resumed run must share with the one it continues: all that change what is computed."""
        bookkeeping = {"prefetch", "checkpoint_every", "keep_last", "keep_best", "measure_every", "measure_prompts"}
        bookkeeping |= {"measure_tokens", "log_every", "max_skipped_steps", "trackers", "count_flops"}
        # How a step is carried out, not what it computes: like another machine, it changes the rounding at most.
        bookkeeping |= {"gradient_checkpointing", "compile", "attention", "losses"}
        # Processes and accumulation may stand in for each other; their product is compared.
        return self.model_dump(mode="json", exclude=bookkeeping | {"strategy", "accumulation"})
