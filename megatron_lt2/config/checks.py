"""Checks across fields, made before anything is allocated.

Each refusal is one sentence: the setting, its value, what to do. Settings that are part of the
schema but not served by this version are refused here too, never ignored.
"""

import math
from dataclasses import fields
from typing import Any

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.fp8 import check_fp8
from megatron_lt2.config.mixers import SPARSE
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT, get_mixer, recurrent_mixer
from megatron_lt2.model.pattern import cut_off, expand_pattern, loop_windows

MAX_KEY_CHANNELS = 256
"""Query/key channels a head that the GPU kernels of the recurrences take."""


def check_config(config: RunConfig, world_size: int, *, need_data: bool = True) -> None:
    """Refuse settings that cannot work together.

    Args:
        config: what was asked for.
        world_size: ranks in the run.
        need_data: also refuse an empty data.path.

    Raises:
        ConfigError: names the setting, the value and the fix.
    """
    _check_ranges(config)
    _check_supported(config)
    _check_model(config.model)
    _check_exits(config.model)
    _check_parallel(config, world_size)
    _check_context(config)
    _check_batch(config, world_size)
    _check_pipeline(config, world_size)
    _check_schedule(config)
    _check_data(config, need_data)
    check_fp8(config)


def _refuse(message: str) -> None:
    raise ConfigError(message)


def _check_ranges(config: RunConfig) -> None:
    """Single values that mean nothing; None stands for a default and is always in range."""
    model, optimizer, training = config.model, config.optimizer, config.training
    positive = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.num_kv_heads,
        "model.head_dim": model.head_dim,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.vocab_size": model.vocab_size,
        "model.loops": model.loops,
        "model.norm_eps": model.norm_eps,
        "model.rope.theta": model.rope.theta,
        "model.init.std": model.init.std,
        "model.init.cutoff": model.init.cutoff,
        "model.window.size": model.window.size,
        "data.sequence_length": config.data.sequence_length,
        "data.shuffle_buffer": config.data.shuffle_buffer,
        "training.steps": training.steps,
        "training.global_batch_size": training.global_batch_size,
        "training.micro_batch_size": training.micro_batch_size,
        "training.exit_after_minutes": training.exit_after_minutes,
        "training.stop_step": training.stop_step,
        "training.max_bad_steps": training.max_bad_steps,
        "training.spike_factor": training.spike_factor,
        "training.hang_minutes": training.hang_minutes,
        "parallel.tensor": config.parallel.tensor,
        "parallel.pipeline": config.parallel.pipeline,
        "parallel.context": config.parallel.context,
        "optimizer.lr": optimizer.lr,
        "optimizer.eps": optimizer.eps,
        "optimizer.decay_steps": optimizer.decay_steps,
        "logging.interval": config.logging.interval,
        "logging.peak_tflops": config.logging.peak_tflops,
    }
    positive |= _mixer_numbers(model)
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            _refuse(f"{name} is {value}; it must be greater than 0")
    not_negative = {
        "model.exit_entropy": model.exit_entropy,
        "model.dsa.loss_weight": model.dsa.loss_weight,
        "model.dsa.dense_steps": model.dsa.dense_steps,
        "model.dsa.index_rope_dim": model.dsa.index_rope_dim,
        "training.eval_interval": training.eval_interval,
        "training.eval_batches": training.eval_batches,
        "checkpoint.interval": config.checkpoint.interval,
        "checkpoint.keep": config.checkpoint.keep,
        "optimizer.min_lr": optimizer.min_lr,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.warmup_steps": optimizer.warmup_steps,
        "optimizer.clip_grad": optimizer.clip_grad,
        "data.num_workers": config.data.num_workers,
    }
    for name, value in not_negative.items():
        if value is not None and not 0 <= value < math.inf:
            _refuse(f"{name} is {value}; it must be 0 or more")
    if not config.run_dir:
        _refuse("run_dir is empty; name a folder for the run")
    if not 0 <= training.seed < 2**32:
        _refuse(f"training.seed is {training.seed}; it must be from 0 to {2**32 - 1}")
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            _refuse(f"optimizer.betas {list(optimizer.betas)} must be at least 0 and below 1")


ANY_NUMBER = (
    *("input_bias", "forget_bias_min", "forget_bias_max", "lower_bound"),
    *("loss_weight", "dense_steps", "index_rope_dim"),
)
"""Settings of mixers that need not be greater than 0."""


def _mixer_numbers(model: ModelConfig) -> dict[str, Any]:
    """Settings of linear and sparse mixers that must be greater than 0, by name."""
    return {
        f"model.{mixer}.{setting.name}": value
        for mixer in (*RECURRENT, *SPARSE)
        for setting in fields(getattr(model, mixer))
        if setting.name not in ANY_NUMBER
        and not isinstance(value := getattr(getattr(model, mixer), setting.name), bool | str)
    }


def _check_supported(config: RunConfig) -> None:
    share = config.memory.recompute_layers
    if not 0 <= share <= 1:
        _refuse(f"memory.recompute_layers is {share}; it is a share, set a number from 0 to 1")
    if 0 < share < 1 and "dsa" in expand_pattern(
        config.model.pattern, config.model.num_layers, MIXER_NAMES
    ):
        _refuse(
            f"memory.recompute_layers {share} would compare the selections of dsa's loops in two "
            "orders; set it to 0 or 1"
        )
    for name in ("fp4", "cpu_offloading", "mtp_num_layers", "num_moe_experts"):
        if config.megatron.transformer.get(name):
            _refuse(
                f"megatron.transformer.{name} {config.megatron.transformer[name]!r} is not "
                "supported yet; leave it out"
            )


def _check_model(model: ModelConfig) -> None:
    try:
        names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
        loop_windows(model.pattern, model.num_layers, model.loops, model.window.size, MIXER_NAMES)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if problem := cut_off(model.pattern, model.num_layers):
        _refuse(problem)
    if not {*RECURRENT, *SPARSE}.issuperset(names):
        _check_attention(model)
    for name in sorted(set(names) & set(SPARSE)):
        _check_sparse(name, model)
    for name in sorted(set(names) & set(RECURRENT)):
        _check_linear_mixer(name, model)


def _check_attention(model: ModelConfig) -> None:
    if model.head_dim is None and model.hidden_size % model.num_heads:
        _refuse(
            f"model.hidden_size {model.hidden_size} is not divisible by model.num_heads "
            f"{model.num_heads}; set model.head_dim or change one of them"
        )
    if model.num_heads % model.kv_heads:
        _refuse(
            f"model.num_heads {model.num_heads} is not divisible by model.num_kv_heads "
            f"{model.kv_heads}; choose a divisor of {model.num_heads}"
        )
    if model.attention_head_dim % 2:
        _refuse(
            f"the attention head dimension is {model.attention_head_dim}; rotary positions need an "
            "even one, set model.head_dim"
        )


def _check_sparse(name: str, model: ModelConfig) -> None:
    """Sizes of a sparse mixer that do not fit together."""
    s = model.mixer_settings(name)
    if s.num_heads % s.num_kv_heads:
        _refuse(
            f"model.{name}.num_kv_heads {s.num_kv_heads} does not divide the {s.num_heads} heads "
            f"of model.{name}; choose a divisor"
        )
    rotary = {"head_dim": s.head_dim}
    if name == "dsa":
        rotary = {"rope_dim": s.rope_dim} if s.kv == "shared" else rotary
        rotary["index_rope_dim"] = s.index_rope_dim
        if s.index_rope_dim > s.index_dim:
            _refuse(
                f"model.dsa.index_rope_dim {s.index_rope_dim} is more than model.dsa.index_dim "
                f"{s.index_dim}; use at most that"
            )
    for setting, channels in rotary.items():
        if channels < 1 and setting != "index_rope_dim":
            _refuse(
                f"model.hidden_size {model.hidden_size} leaves no channel for each of the "
                f"{s.num_heads} heads of model.{name}; set model.{name}.{setting}"
            )
        if channels % 2:
            _refuse(
                f"model.{name}.{setting} is {channels}; rotary positions need an even number, "
                "choose one"
            )
    if name == "nsa" and s.selected_blocks < 3:
        _refuse(
            f"model.nsa.selected_blocks {s.selected_blocks} is too few: the first block, a query's "
            "own and the one before are always among them; use 3 or more"
        )


def _check_exits(model: ModelConfig) -> None:
    if model.loss != "exits":
        return
    if not model.exit_gate:
        _refuse(
            "model.loss 'exits' needs the exit probabilities of model.exit_gate, which is false; "
            "set it to true"
        )
    if model.loops < 2:
        _refuse(
            f"model.loss 'exits' has nothing to choose from with model.loops {model.loops}; use 2 "
            "loops or more, or model.loss 'final'"
        )


def _check_linear_mixer(name: str, model: ModelConfig) -> None:
    mixer = recurrent_mixer(name)(model.mixer_settings(name))
    layout = mixer.layout
    for kind, channels in (("key", layout.head_k_dim), ("value", layout.head_v_dim)):
        if channels < 2 or channels % 2:
            _refuse(
                f"model.{name} gives {channels} {kind} channels a head; kernels need an even "
                f"number, set model.{name}.head_{kind[0]}_dim"
            )
    if layout.head_k_dim > MAX_KEY_CHANNELS:
        _refuse(
            f"model.{name} gives {layout.head_k_dim} key channels a head; the kernels take at "
            f"most {MAX_KEY_CHANNELS}, set model.{name}.head_k_dim or use more heads"
        )
    if problem := mixer.problem():
        _refuse(f"model.{name}.{problem}")


def _check_parallel(config: RunConfig, world_size: int) -> None:
    parallel, model = config.parallel, config.model
    ways = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % ways:
        _refuse(
            f"{world_size} ranks cannot be split into parallel.tensor {parallel.tensor} x "
            f"parallel.pipeline {parallel.pipeline} x parallel.context {parallel.context}; start a "
            f"multiple of {ways} ranks"
        )
    if parallel.sequence and parallel.tensor == 1:
        _refuse("parallel.sequence true needs parallel.tensor of 2 or more; set it to false")
    if parallel.tensor > 1:
        for name in sorted(set(expand_pattern(model.pattern, model.num_layers, MIXER_NAMES))):
            for setting, heads in get_mixer(name).heads(model).items():
                if heads % parallel.tensor:
                    _refuse(
                        f"{setting} {heads} is not divisible by parallel.tensor {parallel.tensor}; "
                        "choose a tensor-parallel size that divides it"
                    )
        if model.num_heads % parallel.tensor:  # megatron-core says so also without attention
            _refuse(
                f"model.num_heads {model.num_heads} is not divisible by parallel.tensor "
                f"{parallel.tensor}; choose a multiple, also where no layer has attention"
            )
        if model.ffn_width % parallel.tensor:
            _refuse(
                f"model.ffn_hidden_size {model.ffn_width} is not divisible by parallel.tensor "
                f"{parallel.tensor}; choose a multiple"
            )
    if parallel.sequence and config.data.sequence_length % parallel.tensor:
        _refuse(
            f"data.sequence_length {config.data.sequence_length} is not divisible by "
            f"parallel.tensor {parallel.tensor}, which parallel.sequence needs; choose a multiple"
        )


def _check_context(config: RunConfig) -> None:
    """Every context-parallel rank holds as many tokens, and enough for a convolution's history."""
    parallel, data, rows = config.parallel, config.data, config.training.micro_batch_size
    if parallel.context == 1:
        return
    tokens = data.sequence_length * (rows if data.isolate_documents else 1)
    ways = parallel.context * (parallel.tensor if parallel.sequence else 1)
    if tokens % ways:
        _refuse(
            f"data.sequence_length {data.sequence_length} makes rows of {tokens} tokens, which "
            f"parallel.context {parallel.context} cannot cut into {ways} equal parts; choose a "
            f"multiple of {ways}"
        )
    held = tokens // parallel.context
    names = set(expand_pattern(config.model.pattern, config.model.num_layers, MIXER_NAMES))
    for name in sorted(names & set(RECURRENT)):
        layout = recurrent_mixer(name)(config.model.mixer_settings(name)).layout
        taps = layout.conv_size
        if parallel.context_exchange == "heads":
            _check_heads_divide(name, layout.heads, parallel.tensor, parallel.context)
            continue
        if held < taps - 1:
            _refuse(
                f"parallel.context {parallel.context} leaves {held} tokens a rank, fewer than the "
                f"{taps - 1} that model.{name}.conv_size {taps} looks back at; use fewer ranks"
            )


def _check_heads_divide(name: str, heads: int, tensor: int, context: int) -> None:
    if heads % (tensor * context):
        among = f"parallel.context {context}"
        if tensor > 1:
            among = f"parallel.tensor {tensor} x {among}"
        _refuse(
            f"parallel.context_exchange 'heads' cannot spread model.{name}.num_heads {heads} over "
            f"{among} ranks; use 'state', or sizes whose product divides {heads}"
        )


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Ranks that see different sequences."""
    parallel = config.parallel
    return world_size // (parallel.tensor * parallel.pipeline * parallel.context)


def _check_batch(config: RunConfig, world_size: int) -> None:
    training = config.training
    replicas = data_parallel_size(config, world_size)
    if training.global_batch_size % (training.micro_batch_size * replicas):
        _refuse(
            f"training.global_batch_size {training.global_batch_size} is not divisible by "
            f"training.micro_batch_size {training.micro_batch_size} x {replicas} data-parallel "
            f"ranks; choose a multiple of {training.micro_batch_size * replicas}"
        )


def _check_pipeline(config: RunConfig, world_size: int) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    stages, given = parallel.pipeline, parallel.pipeline_layers
    if given is not None:
        if len(given) != stages:
            _refuse(
                f"parallel.pipeline_layers {given} is for {len(given)} stages and "
                f"parallel.pipeline is {stages}; make the two agree"
            )
        if min(given) < 1 or sum(given) != layers:
            _refuse(
                f"parallel.pipeline_layers {given} does not split model.num_layers {layers}; give "
                f"every stage at least one layer and {layers} in all"
            )
    if stages > layers:
        _refuse(
            f"parallel.pipeline {stages} is more than model.num_layers {layers}; every stage needs "
            "a layer of its own, use fewer stages"
        )
    if stages > 1 and config.model.loops > 1:
        _check_interleaving(config, world_size)


def _check_interleaving(config: RunConfig, world_size: int) -> None:
    """Micro-batches go through the loops in groups; a group must fill the pipeline."""
    training, stages = config.training, config.parallel.pipeline
    name = "megatron.transformer.microbatch_group_size_per_vp_stage"
    group = config.megatron.transformer.get(name.rpartition(".")[2]) or stages
    if not isinstance(group, int):
        _refuse(f"{name} {group!r} is no whole number; give one of at least {stages}")
    if group < stages:
        _refuse(f"{name} {group} is below parallel.pipeline {stages}; make it at least that")
    replicas = data_parallel_size(config, world_size)
    count = training.global_batch_size // (training.micro_batch_size * replicas)
    # An evaluation takes eval_batches times as many; megatron-core wants the last group to be whole
    # or to fill the pipeline too.
    for total in (count, count * max(1, training.eval_batches)):
        rest = total % group
        if total < group or 0 < rest < stages:
            _refuse(
                f"training.global_batch_size {training.global_batch_size} gives {count} "
                f"micro-batches a rank, which loops on parallel.pipeline {stages} take in groups "
                f"of {group}; choose a multiple of "
                f"{group * training.micro_batch_size * replicas}"
            )


def _check_schedule(config: RunConfig) -> None:
    optimizer, steps = config.optimizer, config.training.steps
    if optimizer.warmup_steps >= steps:
        _refuse(
            f"optimizer.warmup_steps {optimizer.warmup_steps} leaves nothing of training.steps "
            f"{steps}; make it smaller"
        )
    decay = optimizer.decay_steps or max(1, steps // 10)
    if optimizer.schedule == "wsd" and decay > steps - optimizer.warmup_steps:
        _refuse(
            f"optimizer.decay_steps {decay} does not fit into training.steps {steps} after "
            f"{optimizer.warmup_steps} warm-up steps; make it smaller"
        )
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        _refuse(
            f"optimizer.min_lr {optimizer.min_lr} is above optimizer.lr {optimizer.lr}; lower it"
        )


def _check_data(config: RunConfig, need_data: bool) -> None:
    data = config.data
    if need_data and not all(data.prefixes or [""]):
        _refuse(
            "data.path is empty; write data with `python data_prep/tokenize.py --input FILE... "
            "--tokenizer DIR --output PREFIX` and pass --data.path PREFIX"
        )
    if data.weights is not None:
        if len(data.weights) != len(data.prefixes):
            _refuse(
                f"data.weights has {len(data.weights)} entries for {len(data.prefixes)} prefixes "
                "in data.path; give one a prefix"
            )
        if not all(0 < w < math.inf for w in data.weights):
            _refuse(f"data.weights {data.weights} must all be greater than 0")
    try:
        parts = [float(part) for part in data.split.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or not all(0 <= p < math.inf for p in parts) or parts[0] == 0:
        _refuse(
            f"data.split {data.split!r} is not three shares (train, validation, test); "
            "write it like '98,2,0'"
        )
    if config.training.eval_batches > 0 and parts[1] == 0:
        _refuse(
            f"data.split {data.split!r} has no validation part; give it one or set "
            "training.eval_batches 0"
        )
