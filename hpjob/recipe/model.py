"""The recipe: what to train and how, with ``auto`` where the planner may choose.

Names of the ``parallel`` section are those of HybridParallelPlugin; names of the ``model``
section are those of a transformers ``config.json``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, PlainSerializer, model_validator

from hpjob.core.quantity import parse_duration_s
from hpjob.core.schema import Persisted

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Precision = Literal["bf16", "fp16", "fp32"]
PipelineStyle = Literal["1f1b", "interleaved", "zbv"]
SequenceParallelismMode = Literal["split_gather", "ring", "all_to_all", "ring_attn"]
RecomputePolicy = Literal["none", "selective", "full"]
LossPolicy = Literal["stop", "skip", "go_on"]
DurationS = Annotated[
    int, Field(gt=0), BeforeValidator(parse_duration_s), PlainSerializer(lambda s: f"{s}s", return_type=str)
]


class ModelShape(Persisted):
    """Shape of a decoder-only transformer, in the names of a transformers ``config.json``."""

    model_type: str = "llama"
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    num_experts: PositiveInt | None = None
    """Experts of each layer's MLP; None = a dense MLP."""
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    """Width of one expert; None = ``intermediate_size``."""
    config_values: dict[str, JsonValue] | None = None
    """Further values of the config, handed to transformers as they are: scaled rotary bases, sliding windows."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelShape:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if (self.num_experts is None) != (self.num_experts_per_tok is None):
            raise ValueError("num_experts and num_experts_per_tok go together")
        return self

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one decoder layer (gated MLP or experts with their router, two norms, no biases)."""
        q = self.hidden_size * self.num_attention_heads * self.attention_head_dim
        kv = self.hidden_size * self.num_key_value_heads * self.attention_head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.num_experts is not None:
            width = self.moe_intermediate_size or self.intermediate_size
            mlp = self.num_experts * self.hidden_size * (3 * width + 1)
        return 2 * q + 2 * kv + mlp + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters: embedding, layers, final norm, and the head unless it is tied."""
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * self.num_layer_parameters + embeddings + self.hidden_size


class DataSettings(Persisted):
    """Token files made by ``hpjob data prepare``."""

    path: str | None = None
    """Folder with ``tokens.bin`` and ``meta.json``; required to submit, not to plan."""
    seq_length: PositiveInt
    seed: int = 1234
    pack_documents: bool = False
    """Tokens see only their own document, and positions begin anew with each; False = a sample is one text."""
    log_samples: bool = False
    """Write the numbers of the samples of every step into the attempt's folder, a file a data-parallel rank."""


class OptimizerSettings(Persisted):
    """AdamW with a warm-up and a decay to ``min_lr_ratio * lr``."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient clipping over the whole mesh; 0 switches it off."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class TrainingSettings(Persisted):
    """Batch, length and seed of the run."""

    global_batch_size: PositiveInt
    """Sequences a step over all data-parallel ranks and microbatches."""
    steps: PositiveInt
    seed: int = 42
    initial_weights: str | None = None
    """Hugging Face folder to start from; None = random weights."""
    log_every: PositiveInt = 1
    deterministic: bool = False


class CheckpointSettings(Persisted):
    """When to save and what to keep; a save that a signal asks for comes on top and is ephemeral."""

    every_steps: PositiveInt = 100
    """Steps between permanent checkpoints."""
    keep_last: PositiveInt = 2
    """Permanent checkpoints that are kept, the newest ones."""
    keep_every_steps: PositiveInt | None = None
    """Permanent checkpoints of multiples of this are never deleted."""
    ephemeral_every_steps: PositiveInt | None = None
    """Steps between checkpoints that are kept only until the next one is complete; None = none."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training goes on."""

    @model_validator(mode="after")
    def _steps_fit(self) -> CheckpointSettings:
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"keep_every_steps {self.keep_every_steps} is no multiple of every_steps {self.every_steps}, "
                "whose checkpoints it keeps"
            )
        if self.ephemeral_every_steps is not None and self.ephemeral_every_steps >= self.every_steps:
            raise ValueError(
                f"ephemeral_every_steps {self.ephemeral_every_steps} is not less than every_steps {self.every_steps}"
            )
        return self


class LossWatchSettings(Persisted):
    """What to do about a loss that is no number, or far above the usual.

    ``stop`` ends the job; ``skip`` leaves that step's update out on all ranks; ``go_on`` only reports it.
    """

    nan: LossPolicy = "stop"
    """The loss or the gradient norm is not finite. An overflow of scaled fp16 gradients is none of these."""
    spike: LossPolicy = "go_on"
    window: Annotated[int, Field(ge=16, strict=True)] = 64
    """Steps before, whose losses are the usual ones."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    """A spike lies more than so many robust standard deviations (from the median absolute one) above their median."""


class GradientCheckpointSettings(Persisted):
    """Recomputation of activations in the backward pass."""

    policy: RecomputePolicy | Auto = "auto"
    every_kth_layer: PositiveInt = 1
    """With ``full``: recompute every k-th layer of a stage."""
    num_ckpt_layers_per_stage: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """With ``full``: how many first layers of each stage are recomputed, in model order; in place of every k-th."""


class ParallelSettings(Persisted):
    """Degrees and switches; each may be ``auto`` and is then chosen by the planner."""

    tp_size: PositiveInt | Auto = "auto"
    pp_size: PositiveInt | Auto = "auto"
    sp_size: PositiveInt | Auto = "auto"
    ep_size: PositiveInt | Auto = "auto"
    zero_stage: Literal[0, 1, 2, 3] | Auto = "auto"
    zero_shard_size: PositiveInt | None = None
    """ZeRO shards inside groups of this many neighbouring data-parallel ranks and copies across them, so that only
    the sum of gradients leaves a group; null = one group of all."""
    cpu_offload: bool | Auto = "auto"
    """Master weights and optimizer state in the host's memory; auto = only where nothing fits without."""
    pp_style: PipelineStyle | Auto = "auto"
    num_model_chunks: PositiveInt | Auto = "auto"
    num_microbatches: PositiveInt | Auto = "auto"
    microbatch_size: PositiveInt | Auto = "auto"
    enable_sequence_parallelism: bool | Auto = "auto"
    sequence_parallelism_mode: SequenceParallelismMode | Auto = "auto"
    precision: Precision = "bf16"
    use_fp8: bool = False
    """Products of the layers' linear maps in 8-bit floating point, through torchao."""
    initial_scale: Annotated[float, Field(gt=0)] = 2.0**16
    enable_fused_normalization: bool | Auto = "auto"
    enable_flash_attention: bool | Auto = "auto"
    enable_jit_fused: bool | Auto = "auto"
    """Compile layers, loss and optimizer; ``auto`` = on GPUs."""
    gradient_checkpoint_config: GradientCheckpointSettings = GradientCheckpointSettings()


class JobSettings(Persisted):
    """What Slurm is asked for; ``None`` leaves the site's default."""

    gpus_per_node: PositiveInt | Auto = "auto"
    """Ranks per node, one a GPU; ``auto`` takes all GPUs of a node."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: DurationS | None = None
    """Seconds; written as "90m" or "01:30:00"."""
    cpus_per_rank: PositiveInt | None = None
    setup: tuple[str, ...] = ()
    """Shell lines run before the ranks start, for example ``module load``."""
    env: dict[str, str] = Field(default_factory=dict)


class Recipe(Persisted):
    """Everything a person decides about a run."""

    version: Literal[1] = 1
    name: str = ""
    description: str = ""
    model: ModelShape
    data: DataSettings
    training: TrainingSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    parallel: ParallelSettings = ParallelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    loss_watch: LossWatchSettings = LossWatchSettings()
    job: JobSettings = JobSettings()
