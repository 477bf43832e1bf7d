"""What each stage would be, for --dry-run: nothing is built or written."""

from megatron_lt2.distill.plan import Stage, check_stage, plan_stages
from megatron_lt2.distill.settings import DistillSettings


def describe(settings: DistillSettings, world: int | None) -> str:
    """A few lines a stage: student, length, batch, loss, estimated memory of a rank.

    Selections without a result are taken to spread layers evenly.

    Raises:
        ConfigError: a stage's settings do not fit together or the ranks.
    """
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.parallel.start import rank_info

    ranks = world or rank_info().world_size
    lines = []
    for stage in plan_stages(settings, assume=True):
        check_stage(stage, ranks, need_data=False)
        lines += _lines(stage, ranks)
    return "\n".join(lines) + "\n"


def _lines(stage: Stage, ranks: int) -> list[str]:
    from megatron_lt2.model.counting import count_parameters, estimate_memory

    config, settings = stage.config, stage.settings
    model, training, parallel = config.model, config.training, config.parallel
    size = 4 if config.precision.dtype == "fp32" else 2
    lines = [f"stage {stage.number} {settings.label} ({settings.kind}) -> {stage.folder}"]
    mixers = stage.mixers
    kept = [i for i, name in enumerate(mixers) if name == "full"]
    others = ", ".join(sorted({name for name in mixers if name != "full"})) or "none"
    lines.append(
        f"  student   {count_parameters(model):,} parameters, {model.num_layers} layers x "
        f"{model.loops} loops; linear mixers: {others}; full attention in {kept or 'no layer'}"
    )
    if settings.kind == "select":
        chosen = settings.select
        lines.append(f"  select    {chosen.method}, keep {chosen.keep:g} of the layers")
        return lines
    tokens = training.steps * training.global_batch_size * config.data.sequence_length
    lines.append(
        f"  length    {training.steps:,} steps of {training.global_batch_size} x "
        f"{config.data.sequence_length:,} tokens, {tokens / 1e6:,.1f}M in all"
    )
    loss = settings.loss
    if settings.kind in ("mixer", "hidden"):
        lines.append(f"  loss      {loss.measure}")
    else:
        top = f" of the teacher's {loss.top_k} likeliest tokens" if loss.top_k else ""
        lines.append(
            f"  loss      {loss.ce:g} CE + {loss.kl:g} KL{top}, temperature {loss.temperature:g}, "
            f"loops {loss.loops}"
        )
    memory = estimate_memory(config, ranks, size)
    teacher = count_parameters(stage.teacher_model) * size / parallel.tensor
    lines.append(
        f"  memory    of one of {ranks} ranks about {(memory.total + teacher) / 1e9:.1f} GB, the "
        f"teacher's {teacher / 1e9:.1f} GB included"
    )
    return lines
