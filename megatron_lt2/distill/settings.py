"""What a distillation file may say: teacher, student, and one entry a stage.

The sections of a training run (data, training, optimizer, parallel, precision, memory, checkpoint,
logging, megatron) may stand at the top, for all stages, and inside a stage, which wins.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["mixer", "hidden", "logits", "long", "sft", "select"]

SECTIONS = (
    *("data", "training", "optimizer", "parallel", "precision", "memory"),
    *("checkpoint", "logging", "megatron"),
)
"""Sections of `RunConfig` that a stage may set; `model` follows from teacher and student."""


@dataclass(kw_only=True)
class StudentSettings:
    """The student, as far as it differs from the teacher."""

    pattern: str | list[str] = "gdn"
    """Mixer of each layer in stages before a selection, as model.pattern."""

    loops: int | None = None
    """T of the student of a teacher without loops: its layers are then grouped, N / T physical ones
    run T times; default: the teacher's."""

    grouping: Literal["first", "mean"] = "first"
    """Which of the teacher's layers a physical layer starts from, with loops: the first of its
    group, or their mean."""

    model: dict[str, Any] = field(default_factory=dict)
    """Further fields of the model section, e.g. {gdn: {head_v_dim: 128}}; sizes of mixers are by
    default those of the teacher's attention, so that its weights can be copied."""


@dataclass(kw_only=True)
class LossSettings:
    """What a stage minimises."""

    measure: Literal["mse", "l2", "relative"] = "mse"
    """Distance of two vectors of d channels, in stages mixer and hidden: mean squared difference,
    its root (the L2 norm over sqrt(d)), or that mean over the target's mean square."""

    feed: Literal["student", "teacher"] = "student"
    """In stage hidden, what a layer takes: the stream of the student, or of the teacher, so that
    layers learn apart from each other."""

    ce: float = 0.0
    """Weight of the cross entropy of the next token."""

    kl: float = 1.0
    """Weight of the divergence from the teacher; it is multiplied by temperature^2."""

    temperature: float = 1.0
    """Logits of both are divided by this in the divergence."""

    top_k: int | None = None
    """Only the teacher's so many likeliest tokens, their probabilities made to add up to one;
    default: all."""

    over: Literal["vocabulary", "support"] = "vocabulary"
    """With top_k, the student's probabilities: of the whole vocabulary, or also made to add up to
    one over these tokens; 'support' needs ce above 0, which sees the other tokens."""

    cached: str | None = None
    """Folder of the teacher's top_k logits of the stage's text: made when the stage begins, if it
    is not there; the teacher does not run beside the student then. Last loop only."""

    loops: Literal["uniform", "progressive", "final"] = "final"
    """Divergence of which loops, where both have the same number: of all alike, of loop t in
    proportion to t, or of the last."""

    final_from: float = 1.0
    """After this share of the stage's steps only the last loop counts."""


@dataclass(kw_only=True)
class SelectSettings:
    """Which layers keep full attention."""

    method: Literal["one_pass", "trained", "uniform", "given"] = "one_pass"
    """'one_pass': by the divergence on held-out text with one layer restored, 'trained': by the
    loss of a short stage logits from there, 'uniform': evenly spread, 'given': `layers`."""

    keep: float = 0.25
    """Share of the layers that keep full attention."""

    layers: list[int] = field(default_factory=list)
    """Their numbers from 0, for 'given'."""

    batches: int = 8
    """Global batches of validation text that a layer is scored on ('one_pass')."""

    steps: int = 100
    """Optimizer steps a layer ('trained')."""


@dataclass(kw_only=True)
class ChatSettings:
    """Conversations for stage sft, instead of the token files of data.path."""

    train: list[str] | str = field(default_factory=list)
    """JSON-lines files with {"messages": [{"role": .., "content": ..}, ..]}."""

    valid: list[str] | str = field(default_factory=list)
    """The same for validation; default: none."""

    document_end: str = "<|endoftext|>"
    """Token behind each conversation, at which everything restarts; one that does not occur inside
    a conversation."""


@dataclass(kw_only=True)
class StageSettings:
    """One stage; sections of a training run may stand beside these."""

    kind: Kind
    """mixer: outputs of mixers; hidden: the stream after layers; logits: cross entropy and
    divergence end to end; long: the same on long sequences; sft: the same on the assistant's tokens
    of conversations; select: choose the layers that keep full attention."""

    name: str | None = None
    """Of its folder; default: the kind."""

    pattern: str | list[str] | None = None
    """Mixers of the student's layers; default: of the last selection before, else
    student.pattern."""

    teacher: str | None = None
    """Another teacher for this stage, e.g. one tuned to instructions."""

    tokens: float | None = None
    """Length of the stage in tokens, instead of training.steps."""

    train: list[str] | None = None
    """Patterns of the names of what is trained; default: mixer: the new mixers, hidden: all layers,
    else everything."""

    rates: dict[str, float] = field(default_factory=dict)
    """Peak learning rates by pattern of parameter names; the first that fits counts."""

    loss: LossSettings = field(default_factory=LossSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    chat: ChatSettings = field(default_factory=ChatSettings)
    sections: dict[str, Any] = field(default_factory=dict)
    """The sections of a training run that stood in the stage."""

    @property
    def label(self) -> str:
        """Name of the stage."""
        return self.name or self.kind


@dataclass(kw_only=True)
class DistillSettings:
    """A whole distillation."""

    teacher: str
    """Run folder of the teacher, as checkpoints_tools/convert.py import makes it."""

    run_dir: str = "runs/distill"
    """Folder of the stages; a second start there continues."""

    student: StudentSettings = field(default_factory=StudentSettings)
    stages: list[StageSettings] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)
    """The sections of a training run that stood at the top, for all stages."""
