"""Mapping objects: how one tensor of a training checkpoint becomes tensors of a Hugging Face model,
and how those become it again.

A family is a list of them. They know names and shapes only, not file formats, and every one checks
the shape of what it is given: a tensor cut at the wrong place still loads, trains and talks
nonsense.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORED_PREFIXES = (
    *("optimizer.", "chained_", "rng/", "rng_state", "rerun_state_machine_state"),
    *("common_state", "opt_param_scheduler"),
)
IGNORED_PARTS = ("_extra_state",)

VOCAB_MULTIPLE = 16
"""Vocabulary matrices get rows of zeros up to a multiple of this, as one training rank pads them;
what reads them for more ranks pads further by itself."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorMapping:
    """One checkpoint tensor and the Hugging Face tensors made of it; this one only renames.

    source: name in the checkpoint.
    targets: names in the Hugging Face model.
    shape: expected shape of the source.
    """

    source: str
    targets: tuple[str, ...]
    shape: Shape

    def convert(self, tensor: "Tensor") -> tuple["Tensor", ...]:
        """The target tensors, in the order of `targets` (views of the source).

        Raises:
            ValueError: the source does not have the expected shape.
        """
        self.check_shape(tuple(tensor.shape))
        return self.split(tensor)

    def places(self, whole: "Tensor") -> tuple["Tensor", ...]:
        """The other way: views of a checkpoint tensor of `written_shape`, one a target, which
        become the checkpoint tensor of these targets when they are filled. What is padding is set
        to zero here.

        On a tensor of the meta device they say where the bytes of each target lie.
        """
        return self.split(whole)

    def check_shape(self, shape: Shape) -> None:
        """Refuse any other shape than the expected one."""
        if shape != self.shape:
            raise ValueError(f"{self.source} has shape {shape}, expected {self.shape}")

    def target_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the targets."""
        return (self.shape,)

    def written_shape(self) -> Shape:
        """Shape of the checkpoint tensor that is written."""
        return self.shape

    def split(self, tensor: "Tensor") -> tuple["Tensor", ...]:
        """What `convert` does after the check."""
        return (tensor,)


@dataclass(frozen=True)
class CutRows(TensorMapping):
    """Vocabulary matrices: `shape[0]` real rows, then padding rows that are dropped."""

    def check_shape(self, shape: Shape) -> None:
        """At least the real rows must be there."""
        if len(shape) != 2 or shape[0] < self.shape[0] or shape[1] != self.shape[1]:
            raise ValueError(
                f"{self.source} has shape {shape}, expected at least {self.shape[0]} rows of "
                f"{self.shape[1]}"
            )

    def written_shape(self) -> Shape:
        return (-(-self.shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, self.shape[1])

    def split(self, tensor: "Tensor") -> tuple["Tensor", ...]:
        return (tensor[: self.shape[0]],)

    def places(self, whole: "Tensor") -> tuple["Tensor", ...]:
        whole[self.shape[0] :] = 0
        return self.split(whole)


@dataclass(frozen=True)
class SplitRows(TensorMapping):
    """Matrices stacked on dim 0; `rows` of each target."""

    rows: tuple[int, ...]

    def target_shapes(self) -> tuple[Shape, ...]:
        return tuple((rows, *self.shape[1:]) for rows in self.rows)

    def split(self, tensor: "Tensor") -> tuple["Tensor", ...]:
        return tensor.split(list(self.rows), dim=0)


@dataclass(frozen=True)
class SplitGroups(TensorMapping):
    """Matrices interleaved on dim 0: each group holds `rows_per_group` rows of each target.

    megatron-core's fused attention projection: a group is one key/value head with the query heads
    that share it, its rows are [queries | output gate of the same heads | key | value].
    """

    groups: int
    rows_per_group: tuple[int, ...]

    def target_shapes(self) -> tuple[Shape, ...]:
        return tuple((self.groups * rows, *self.shape[1:]) for rows in self.rows_per_group)

    def split(self, tensor: "Tensor") -> tuple["Tensor", ...]:
        grouped = tensor.unflatten(0, (self.groups, -1))
        return tuple(part.flatten(0, 1) for part in grouped.split(list(self.rows_per_group), dim=1))

    def places(self, whole: "Tensor") -> tuple["Tensor", ...]:
        # [groups, rows, width] each: flattened, they would be copies.
        grouped = whole.unflatten(0, (self.groups, -1))
        return grouped.split(list(self.rows_per_group), dim=1)


@dataclass(frozen=True)
class AddAxis(TensorMapping):
    """[channels, taps] becomes [channels, 1, taps], as torch's depthwise Conv1d holds it."""

    def target_shapes(self) -> tuple[Shape, ...]:
        return ((self.shape[0], 1, *self.shape[1:]),)

    def split(self, tensor: "Tensor") -> tuple["Tensor", ...]:
        return (tensor.unsqueeze(1),)


def is_ignored(name: str) -> bool:
    """Whether a checkpoint name is training state that no exported model has."""
    return name.startswith(IGNORED_PREFIXES) or any(part in name for part in IGNORED_PARTS)


def check_names(names: Iterable[str], mappings: Sequence[TensorMapping]) -> None:
    """Every weight of the checkpoint must have a mapping and every mapping its weight.

    Raises:
        ValueError: names all missing and all unknown tensors.
    """
    present = {name for name in names if not is_ignored(name)}
    wanted = {mapping.source for mapping in mappings}
    if problems := _differences(present, wanted):
        raise ValueError(
            f"the tensors of the checkpoint are not those of its run_config.yaml; {problems}"
        )


def check_targets(
    shapes: Mapping[str, Shape], mappings: Sequence[TensorMapping], where: str
) -> None:
    """The tensors of a Hugging Face model must be exactly those of the table, with its shapes.

    Args:
        shapes: of the model's tensors, by name.
        mappings: the family's table.
        where: what the tensors belong to, for the message.

    Raises:
        ValueError: names all missing and all unknown tensors, or the first of another shape.
    """
    wanted = {name for mapping in mappings for name in mapping.targets}
    if problems := _differences(set(shapes), wanted):
        raise ValueError(f"{where}: the tensors are not those of its config.json; {problems}")
    for mapping in mappings:
        for name, shape in zip(mapping.targets, mapping.target_shapes(), strict=True):
            try:
                check_target(name, shapes[name], shape)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def check_target(name: str, shape: Shape, expected: Shape) -> None:
    """Refuse any other shape than the expected one."""
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}, expected {expected}")


def _differences(present: set[str], wanted: set[str]) -> str:
    problems = []
    if missing := sorted(wanted - present):
        problems.append(f"missing: {', '.join(missing)}")
    if unknown := sorted(present - wanted):
        problems.append(f"unknown: {', '.join(unknown)}")
    return "; ".join(problems)


def convert_all(
    tensors: Mapping[str, "Tensor | Callable[[], Tensor]"],
    mappings: Sequence[TensorMapping],
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield (Hugging Face name, tensor), one source tensor after another in the order of the table.

    Args:
        tensors: checkpoint tensors by name, or functions that read them when their turn comes.
        mappings: the family's table.

    Raises:
        ValueError: names or shapes do not match, before anything is yielded for names.
    """
    check_names(tensors, mappings)
    for mapping in mappings:
        value = tensors[mapping.source]
        tensor = value() if callable(value) else value
        yield from zip(mapping.targets, mapping.convert(tensor), strict=True)
