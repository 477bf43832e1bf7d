"""The parallel layouts of a run on a number of GPUs, with what each is estimated to cost.

Which layouts can work is decided by config/checks.py alone: every candidate is a copy of the run's
config with other parallel sizes, and what `check_config` refuses is left out with its sentence.
"""

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megatron_lt2.config.checks import check_config, data_parallel_size
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import MemoryConfig, ParallelConfig, RunConfig
from megatron_lt2.mixers.registry import RECURRENT
from megatron_lt2.model.cost import (
    MemoryEstimate,
    estimate_memory,
    mixer_names,
    value_bytes,
)
from megatron_lt2.model.counting import training_flops_per_token
from megatron_lt2.model.speed import Machine, StepTime, estimate_step
from megatron_lt2.model.traffic import Transfer, transfers

USABLE = 0.92
"""Share of a GPU's memory that an estimate may fill: the rest is the CUDA context, NCCL's buffers
and what the allocator cannot use."""

MAX_MICRO_BATCH = 16
MAX_GPUS = 16384

RECOMPUTE = {
    "none": MemoryConfig(),
    "cheap": MemoryConfig(recompute_cheap=True),
    "full": MemoryConfig(recompute_layers=1.0),
}

CHOICES = (
    *("tensor", "sequence", "pipeline", "context", "context_exchange"),
    *("micro_batch_size", "recompute"),
)
"""What a layout chooses; data parallelism takes the ranks that are left."""


@dataclass(frozen=True)
class Layout:
    """One layout, the config that has it, and its estimates."""

    config: RunConfig
    gpus: int
    memory: MemoryEstimate
    time: StepTime

    @property
    def data(self) -> int:
        """Ranks that see different sequences."""
        return data_parallel_size(self.config, self.gpus)

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        batch = self.config.training.global_batch_size * self.config.data.sequence_length
        return batch / self.time.total

    def utilisation(self, machine: Machine) -> float:
        """Model operations as a share of the matrix ceiling; recomputation does not count."""
        length = self.config.data.sequence_length
        operations = training_flops_per_token(self.config.model, length) * self.tokens_per_s
        return operations / self.gpus / machine.matrix

    def transfers(self) -> list[Transfer]:
        """What a rank sends in a step."""
        return transfers(self.config, self.gpus)

    def fits(self, memory: float) -> bool:
        """Whether GPUs of `memory` bytes are large enough."""
        return self.memory.total <= USABLE * memory

    def sizes(self) -> dict[str, Any]:
        """What was chosen, by name."""
        parallel = self.config.parallel
        return {
            "tensor": parallel.tensor,
            "sequence": parallel.sequence,
            "pipeline": parallel.pipeline,
            "context": parallel.context,
            "context_exchange": parallel.context_exchange,
            "data": self.data,
            "micro_batch_size": self.config.training.micro_batch_size,
            "recompute": _recompute_name(self.config.memory),
        }

    def overrides(self, base: RunConfig) -> list[str]:
        """Command-line options that turn `base` into this layout."""
        parallel = self.config.parallel
        options = [
            *("--parallel.tensor", str(parallel.tensor)),
            *("--parallel.sequence", str(parallel.sequence).lower()),
            *("--parallel.pipeline", str(parallel.pipeline)),
            *("--parallel.context", str(parallel.context)),
            *("--training.micro_batch_size", str(self.config.training.micro_batch_size)),
        ]
        if parallel.context_exchange != base.parallel.context_exchange:
            options += ["--parallel.context_exchange", parallel.context_exchange]
        if self.config.memory != base.memory:
            for name, value in asdict(self.config.memory).items():
                options += [f"--memory.{name}", str(value).lower()]
        return options


def _recompute_name(memory: MemoryConfig) -> str:
    for name, settings in RECOMPUTE.items():
        if settings == memory:
            return name
    return f"{memory.recompute_layers:.0%}"


def divisors(number: int, most: int | None = None) -> list[int]:
    """Divisors of `number` up to `most`, ascending."""
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def candidates(
    base: RunConfig, gpus: int, machine: Machine, pinned: Set[str] = frozenset()
) -> Iterator[RunConfig]:
    """Configs of `base` with every parallel layout of `gpus` ranks, checked or not.

    Args:
        pinned: choices that keep the value of `base`.
    """

    def options(name: str, values: list[Any], own: Any) -> list[Any]:
        return [own] if name in pinned else values

    parallel, batch = base.parallel, base.training.global_batch_size
    linear = not set(RECURRENT).isdisjoint(mixer_names(base.model))
    for tensor in options("tensor", divisors(gpus, machine.gpus_per_node), parallel.tensor):
        # More stages than layers are refused anyway.
        stages = divisors(gpus, base.model.num_layers)
        for pipeline in options("pipeline", stages, parallel.pipeline):
            left = gpus // (tensor * pipeline)
            if gpus % (tensor * pipeline):
                continue
            for context in options("context", divisors(left), parallel.context):
                if left % context or batch % (left // context):
                    continue
                each = divisors(batch // (left // context), MAX_MICRO_BATCH)
                micros = options("micro_batch_size", each, base.training.micro_batch_size)
                shared = [False, True] if tensor > 1 else [False]
                ways = ["state", "heads"] if context > 1 and linear else [parallel.context_exchange]
                for sequence, exchange, micro, again in product(
                    options("sequence", shared, parallel.sequence),
                    options("context_exchange", ways, parallel.context_exchange),
                    micros,
                    options("recompute", list(RECOMPUTE.values()), base.memory),
                ):
                    chosen = replace(
                        parallel,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        sequence=sequence,
                        context_exchange=exchange,
                    )
                    yield _with(base, chosen, micro, again)


def _with(base: RunConfig, parallel: ParallelConfig, micro: int, again: MemoryConfig) -> RunConfig:
    return replace(
        base,
        parallel=parallel,
        training=replace(base.training, micro_batch_size=micro),
        memory=replace(again),
    )


def estimate(config: RunConfig, gpus: int, machine: Machine) -> Layout:
    """The estimates of one layout."""
    memory = estimate_memory(config, gpus, value_bytes(config))
    return Layout(config, gpus, memory, estimate_step(config, gpus, machine))


def find_layouts(
    base: RunConfig,
    gpus: int,
    machine: Machine,
    memory: float,
    pinned: Set[str] = frozenset(),
) -> tuple[list[Layout], Counter[str]]:
    """Layouts that the checks accept: those that fit first, each kind fastest first.

    Args:
        base: the run; its parallel sizes play no part unless pinned.
        gpus: ranks.
        memory: bytes of a GPU.
        pinned: choices that keep the value of `base`.

    Returns:
        The layouts, and how often the checks gave which refusal.
    """
    found, refused = [], Counter[str]()
    for config in candidates(base, gpus, machine, pinned):
        try:
            check_config(config, gpus, need_data=False)
        except ConfigError as error:
            refused[str(error)] += 1
            continue
        found.append(estimate(config, gpus, machine))
    return sorted(found, key=lambda layout: _order(layout, memory)), refused


def _order(layout: Layout, memory: float) -> tuple[float, ...]:
    if layout.fits(memory):
        return 0, layout.time.total, layout.memory.total
    return 1, layout.memory.total, layout.time.total


def best_layout(
    base: RunConfig, gpus: int, machine: Machine, memory: float, pinned: Set[str] = frozenset()
) -> Layout | None:
    """The first of `find_layouts` if it fits, else None; checks and times far fewer."""
    fitting = []
    for config in candidates(base, gpus, machine, pinned):
        need = estimate_memory(config, gpus, value_bytes(config))
        if need.total <= USABLE * memory:
            fitting.append(Layout(config, gpus, need, estimate_step(config, gpus, machine)))
    for layout in sorted(fitting, key=lambda layout: _order(layout, memory)):
        try:
            check_config(layout.config, gpus, need_data=False)
        except ConfigError:
            continue
        return layout
    return None


def fewest_gpus(
    base: RunConfig, above: int, machine: Machine, memory: float, pinned: Set[str] = frozenset()
) -> int | None:
    """The smallest doubling of `above` GPUs on which some layout fits."""
    gpus = 2 * above
    while gpus <= MAX_GPUS:
        if best_layout(base, gpus, machine, memory, pinned) is not None:
            return gpus
        gpus *= 2
    return None
