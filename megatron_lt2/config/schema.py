"""The run configuration: what a YAML file may say and what every field means.

One dataclass a component, nested in `RunConfig`. The text under a field is its help text. Values
are plain data here; checks that need more than one field live in `checks.py`, loading in `load.py`,
and the step from here to megatron-core's own configs in `megatron_lt2/model/core_config.py`.

`None` stands for "work it out": the value is derived once (properties below) and printed at start.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_lt2.config.mixers import (
    DeltaNetConfig,
    DSAConfig,
    GDNConfig,
    GLAConfig,
    HGRN2Config,
    KDAConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MLSTMConfig,
    NSAConfig,
    RetNetConfig,
    WindowConfig,
)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(kw_only=True)
class RopeConfig:
    """Rotary positions, used by the layers whose architecture has them (full attention)."""

    theta: float = 10000.0
    """Base of the rotary frequencies."""

    interleaved: bool = False
    """Pair neighbouring channels (0,1),(2,3).. instead of the two halves of a head."""


@dataclass(kw_only=True)
class AttentionConfig:
    """Full (softmax) attention layers."""

    output_gate: bool = True
    """Multiply the attention output by sigmoid(x W_g), W_g zero at the start (Qiu et al.
    2025, gate "G1")."""


@dataclass(kw_only=True)
class InitConfig:
    """Initial weights of the linear maps and the embedding."""

    std: float | None = None
    """Standard deviation; default: 1/sqrt(input width) of each matrix (hidden_size for the
    embedding)."""

    cutoff: float = 3.0
    """The normal distribution is cut off at this many standard deviations."""


@dataclass(kw_only=True)
class ModelConfig:
    """The LT2 architecture (arXiv 2605.20670); the defaults are the paper's 1.3B hybrid."""

    num_layers: int = 21
    """Physical layers N."""

    hidden_size: int = 2048
    """Width d of the residual stream."""

    num_heads: int = 16
    """Attention heads; also the default head count of the other mixers."""

    num_kv_heads: int | None = None
    """Key/value heads of full attention (grouped-query attention); default: num_heads."""

    head_dim: int | None = None
    """Channels a full-attention head; default: hidden_size / num_heads."""

    ffn_hidden_size: int | None = None
    """Inner width of the SwiGLU; default: 8/3 * hidden_size rounded up to 256."""

    vocab_size: int | None = None
    """Vocabulary; default: the tokenizer's largest id + 1, as written in the data manifest."""

    pattern: str | list[str] = "4*gdn+full"
    """Mixer of each layer: '4*gdn+full' is repeated and cut to num_layers; a list names every
    layer."""

    loops: int = 4
    """T: how often the whole stack runs, with the same weights."""

    loop_residual: Literal["per_channel", "none"] = "per_channel"
    """Add rho_t * (input of loop t) to the output of loop t; rho is T x d and starts at zero."""

    norm_mode: Literal["pre", "sandwich"] = "pre"
    """'pre': norm before mixer and FFN (LT2). 'sandwich': also after them, before the
    residual add (Ouro)."""

    inter_loop_norm: bool = False
    """Apply the final norm at the end of every loop (Ouro) instead of once after the last (LT2)."""

    exit_gate: bool = False
    """Have a gate that says after each loop how likely a token leaves (Ouro); only the loss 'exits'
    trains it, see docs/exits.md."""

    loss: Literal["final", "exits"] = "final"
    """'final': cross entropy after the last loop (LT2). 'exits': sum_t p_t CE_t - beta H(p)
    (Ouro)."""

    exit_entropy: float = 0.1
    """beta of the loss 'exits': how much the entropy of the exit probabilities is worth."""

    norm_eps: float = 1e-6
    """Epsilon of the block norms and the final norm."""

    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""

    rope: RopeConfig = field(default_factory=RopeConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    nsa: NSAConfig = field(default_factory=NSAConfig)
    dsa: DSAConfig = field(default_factory=DSAConfig)
    gdn: GDNConfig = field(default_factory=GDNConfig)
    kda: KDAConfig = field(default_factory=KDAConfig)
    deltanet: DeltaNetConfig = field(default_factory=DeltaNetConfig)
    mamba2: Mamba2Config = field(default_factory=Mamba2Config)
    retnet: RetNetConfig = field(default_factory=RetNetConfig)
    gla: GLAConfig = field(default_factory=GLAConfig)
    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    mlstm: MLSTMConfig = field(default_factory=MLSTMConfig)
    hgrn2: HGRN2Config = field(default_factory=HGRN2Config)
    init: InitConfig = field(default_factory=InitConfig)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of full attention."""
        return self.num_kv_heads or self.num_heads

    @property
    def attention_head_dim(self) -> int:
        """Channels a full-attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_width(self) -> int:
        """Inner width of the SwiGLU."""
        return self.ffn_hidden_size or round_up(int(2 * 4 * self.hidden_size / 3), 256)

    @property
    def layer_norms(self) -> int:
        """Norms of a layer over the residual stream's width, those inside a mixer not counted."""
        return 4 if self.norm_mode == "sandwich" else 2

    @property
    def heads_run(self) -> int:
        """How often a training pass goes through the output head."""
        return self.loops if self.loss == "exits" else 1

    def mixer_settings(self, name: str) -> Any:
        """Settings of a linear or sparse mixer with every None replaced."""
        return getattr(self, name).resolve(self.hidden_size, self.num_heads)


@dataclass(kw_only=True)
class DataConfig:
    """Training text: token files written by data_prep/tokenize.py."""

    path: list[str] | str = field(default_factory=list)
    """Prefix of token files to train on, or a list of them."""

    format: Literal["megatron", "webdataset"] | None = None
    """What the token files must be; default: what their manifests say."""

    shuffle_buffer: int = 16384
    """Documents in the shuffle buffer of numbered shards; a single .bin/.idx pair is shuffled as a
    whole instead."""

    weights: list[float] | None = None
    """Share of each prefix in the blend; default: by size."""

    split: str = "98,2,0"
    """Parts of each prefix for training, validation and test, by document."""

    tokenizer: str | None = None
    """Tokenizer folder or tokenizer.json; default: the one that the data manifest names."""

    sequence_length: int = 4096
    """Tokens a sequence."""

    isolate_documents: bool = True
    """Restart attention, convolution, recurrence and positions at each document inside a
    sequence."""

    cache_dir: str | None = None
    """Where shuffled sample indices are kept; default: <run_dir>/data_cache."""

    num_workers: int = 2
    """Loader processes a rank; 0 loads in the training process."""

    @property
    def prefixes(self) -> list[str]:
        """The prefixes as a list."""
        return [self.path] if isinstance(self.path, str) else self.path


@dataclass(kw_only=True)
class TrainingConfig:
    """Length, batch size and evaluation."""

    steps: int = 1000
    """Optimizer steps of the whole run."""

    global_batch_size: int = 96
    """Sequences a step, over all ranks."""

    micro_batch_size: int = 1
    """Sequences a rank takes through the model at once."""

    seed: int = 1234
    """Seed of weights, data order and dropout."""

    eval_interval: int = 100
    """Steps between evaluations on the validation split; 0: only after the last step if
    eval_batches > 0."""

    eval_batches: int = 10
    """Global batches an evaluation; 0 turns evaluation off."""

    exit_after_minutes: float | None = None
    """Save and leave (code 75) once the run has taken this long; for queues with a time limit."""

    max_bad_steps: int = 10
    """Leave (code 76) after so many steps in a row that were skipped: loss or gradient NaN or
    infinite, or a spike."""

    spike_factor: float | None = None
    """Skip a step whose loss is over this many times the median of the last 64; default: never."""

    hang_minutes: float | None = 30.0
    """Print all stacks and leave (code 77) after so long without progress, before the first step
    four times as long; null: never."""

    stop_step: int | None = None
    """Save and leave (code 75) after this step although `steps` is larger; for tests and staged
    runs."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""

    min_lr: float | None = None
    """Learning rate at the end; default: 1e-6 * lr (LT2's cosine)."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's moment decays."""

    eps: float = 1e-8
    """Adam's epsilon."""

    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to biases, norms and per-channel parameters."""

    clip_grad: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""

    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape after the warm-up; 'wsd' stays at the peak and decays over the last decay_steps."""

    warmup_steps: int = 0
    """Steps of linear warm-up."""

    decay_steps: int | None = None
    """Steps of the final decay of 'wsd'; default: a tenth of training.steps."""

    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the final decay of 'wsd'."""


@dataclass(kw_only=True)
class ParallelConfig:
    """How the model and the batch are spread over ranks; data parallelism takes what is left."""

    tensor: int = 1
    """Tensor-parallel ranks."""

    pipeline: int = 1
    """Pipeline stages; every loop passes through all of them."""

    pipeline_layers: list[int] | None = None
    """Physical layers of each stage; default: as even as possible, earlier stages take one more."""

    context: int = 1
    """Context-parallel ranks (shards of a sequence)."""

    context_exchange: Literal["state", "heads"] = "state"
    """What linear mixers exchange over context-parallel ranks: the recurrent state, whatever the
    length; or, where the ranks divide the heads, the tokens ('heads'), so that each rank runs
    whole sequences of some heads."""

    sequence: bool = False
    """Sequence parallelism: shard norms and residual adds over the tensor-parallel ranks."""

    distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""

    overlap_grad_reduce: bool | None = None
    """Reduce gradients while the backward pass runs; default: on with more than one
    data-parallel GPU rank."""

    overlap_param_gather: bool | None = None
    """Gather updated parameters while the next forward pass runs; default: as
    overlap_grad_reduce."""

    def stage_layers(self, num_layers: int) -> list[int]:
        """Physical layers of each pipeline stage."""
        if self.pipeline_layers is not None:
            return list(self.pipeline_layers)
        each, left = divmod(num_layers, self.pipeline)
        return [each + (stage < left) for stage in range(self.pipeline)]


@dataclass(kw_only=True)
class PrecisionConfig:
    """Number formats and which kernels serve the recurrences."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Weights and activations: bf16 with fp32 master weights, or fp32; 'auto': bf16 on GPU, fp32
    on CPU."""

    fp8: Literal["none", "delayed", "current", "block"] = "none"
    """Matrix products of the layers in FP8, through Transformer Engine, by this scaling recipe;
    recurrences, attention, norms, gates, the head and the embedding stay in bf16."""

    kernels: Literal["auto", "fla", "torch"] = "auto"
    """Recurrence kernels: FLA's Triton kernels or the plain torch chunk form; 'auto': FLA on
    GPU."""

    selftest: bool = True
    """At start, compare each mixer's GPU kernel with the plain recurrence on random numbers, and
    refuse to train if they differ by more than rounding."""

    warmup: Literal["auto", "off"] = "auto"
    """On a GPU, 'auto': FLA's kernels take tuned configurations where there are some for this GPU,
    and the first rank of a node compiles all kernels side by side if the cache lacks them (see
    `python -m megatron_lt2.warmup`). 'off': FLA times its candidates during the first step."""


@dataclass(kw_only=True)
class MemoryConfig:
    """What the backward pass needs: kept since the forward pass, or made again."""

    recompute_cheap: bool = False
    """Make norms, the convolution and the gated norm again instead of keeping their outputs: a
    third less memory for 2 to 3 % of the time; the gradients are the same to the last bit."""

    recompute_layers: float = 0.0
    """Share of the T x N passes through a layer that keep only their input and run again in the
    backward pass, the earliest ones; 1: all, for a third more time."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming; checkpoints live in <run_dir>/checkpoints."""

    interval: int = 500
    """Steps between checkpoints; one is always written at the end."""

    keep: int = 3
    """Newest checkpoints kept; older ones go after a newer one is durable. 0 keeps all."""

    async_save: bool = True
    """Write in the background while training goes on."""

    resume: bool = True
    """Continue from the newest complete checkpoint in run_dir, if there is one."""

    init_from: str | None = None
    """Run folder or checkpoint whose weights a new run starts from, with a new optimizer at step 0;
    a run that resumes does not read it again."""


@dataclass(kw_only=True)
class LoggingConfig:
    """What is reported, and how often."""

    interval: int = 10
    """Steps between console lines and metric records."""

    tensorboard: bool = True
    """Also write TensorBoard files to <run_dir>/tensorboard."""

    peak_tflops: float | None = None
    """Peak of one device for MFU, in TFLOP/s; default: the named value for known GPUs, else MFU
    is n/a."""


@dataclass(kw_only=True)
class MegatronConfig:
    """Any further field of megatron-core's own configs, by its megatron-core name."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron.core.transformer.TransformerConfig, e.g. deterministic_mode: true."""

    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron.core.distributed.DistributedDataParallelConfig, e.g. bucket_size:
    40000000."""

    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron.core.optimizer.OptimizerConfig, e.g. log_num_zeros_in_grad: true."""


@dataclass(kw_only=True)
class RunConfig:
    """One training run."""

    run_dir: str = "runs/default"
    """Folder of this run: config.yaml, metrics.jsonl, tensorboard/, checkpoints/. A second start
    resumes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
