"""Comparing a checkpoint with a Hugging Face folder: every tensor, then what the models compute.

Equal tensors do not make equal models: a rotary base, an epsilon or a layout of heads that was read
wrongly changes no weight. So both models run on text, in fp32, and where they depart the first
layer that does is named.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools import side_files
from checkpoints_tools.importing import open_hf
from checkpoints_tools.mappings.base import TensorMapping, check_names, check_targets
from checkpoints_tools.mappings.lt2 import lt2_config_values, lt2_mappings
from checkpoints_tools.mappings.registry import family_of_config
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from checkpoints_tools.safetensors_files import SafetensorsFolder
from megatron_lt2.config.schema import RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

TEXT = """The first lighthouse of which there is a description stood before Alexandria's harbour.
It was built in the third century before our era, of white stone, in three parts: a square one, an
eight-sided one above it, and a round one on top, where a fire burned at night. Sailors are said to
have seen it from fifty kilometres away. It stood for about 1,500 years, until earthquakes brought
it down; its stones were used again for a fort, which can still be visited today. How bright was the
fire, and what was burned in it, in a land with so few trees? Nobody knows. 2 + 2 = 4, and the word
for such towers is, in many languages, still the name of the island: pharos, phare, faro.
"""

DEPARTED = 1e-3
"""Relative difference of a layer's output from which on it counts as another one: rounding in fp32
stays two orders of magnitude below."""

DISTINCT = 8
"""Distinct tokens that a text must have: where all are alike, attention cannot tell positions."""


@dataclass
class Report:
    """What was found; `equal` decides the exit code."""

    lines: list[str] = field(default_factory=list)
    equal: bool = True

    def say(self, line: str, *, good: bool = True) -> None:
        """Add a line; one that is not good makes the two sides different."""
        self.lines.append(line)
        self.equal = self.equal and good


def verify(
    checkpoint: Path,
    hf: Path,
    *,
    against: str = "own",
    text: Path | None = None,
    tokens: int = 256,
    max_kl: float = 1e-9,
) -> Report:
    """Compare a checkpoint with a Hugging Face folder.

    Args:
        checkpoint: run folder, checkpoints folder or iteration folder.
        hf: the Hugging Face folder.
        against: "tensors", "own" (our transformers model with the folder's weights) or "hf" (the
            model that the folder names).
        text: file to compare on; default: `TEXT`.
        tokens: of the text that are used.
        max_kl: largest Kullback-Leibler divergence of a token's prediction, in nats.

    Raises:
        ValueError: a side cannot be read, or is a model of another shape.
    """
    from megatron_lt2.config.load import load_saved

    source = find_checkpoint(checkpoint)
    config = load_saved(source / "run_config.yaml")
    report = Report()
    fields = side_files.read_config(hf)
    family = family_of_config(fields, hf / "config.json")
    try:
        theirs = family.run_config(fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{hf}: {error}") from None
    _compare_configs(report, config, theirs)
    _compare_tensors(report, PlainCheckpoint(source), SafetensorsFolder(hf), family, theirs)
    if against == "tensors":
        return report
    ids = _ids(report, source, hf, text, tokens, theirs)
    reference = _own_model(hf, theirs) if against == "own" else _their_model(hf)
    _compare_outputs(report, source, reference, ids, theirs, max_kl)
    return report


def _compare_configs(report: Report, ours: RunConfig, theirs: RunConfig) -> None:
    """The run must say of its model what the folder says, in LT2's words."""
    one, other = lt2_config_values(ours), lt2_config_values(theirs)
    for name in one:
        if name == "max_position_embeddings":
            continue
        if one[name] != other.get(name):
            report.say(
                f"config: {name} is {one[name]!r} in the checkpoint, {other.get(name)!r} in the "
                "folder",
                good=False,
            )


def _compare_tensors(
    report: Report, ours: PlainCheckpoint, theirs: SafetensorsFolder, family: Any, config: RunConfig
) -> None:
    import torch

    table: list[TensorMapping] = family.table(config.model)
    check_names(ours, table)
    check_targets(theirs.shapes, table, str(theirs.folder))
    count, rounded = 0, set()
    for mapping in table:
        parts = mapping.convert(ours[mapping.source])
        for name, tensor in zip(mapping.targets, parts, strict=True):
            other = theirs[name]
            if tensor.dtype != other.dtype:
                wide, narrow = sorted((tensor, other), key=lambda x: -x.element_size())
                rounded.add(f"{wide.dtype} to {narrow.dtype}".replace("torch.", ""))
                tensor, other = tensor.to(narrow.dtype), other.to(narrow.dtype)
            count += 1
            if not torch.equal(tensor, other):
                off = (tensor.double() - other.double()).abs().max().item()
                report.say(f"tensor {name}: differs by up to {off:.3g}", good=False)
                return
    after = f", after rounding {', '.join(sorted(rounded))}" if rounded else ""
    report.say(f"tensors: all {count} equal{after}")


def _ids(
    report: Report, source: Path, hf: Path, text: Path | None, count: int, config: RunConfig
) -> "Tensor":
    """Token ids [1, count] of the text; at random where there is no tokenizer."""
    import torch

    from megatron_lt2.data.tokenizer import load_tokenizer

    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    count = min(count, config.data.sequence_length)
    for folder in (hf, source.absolute().parent.parent / "tokenizer"):
        if (folder / "tokenizer.json").is_file():
            try:
                words = TEXT if text is None else text.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{text}: not UTF-8 text ({error})") from None
            ids = load_tokenizer(folder).encode_batch([words])[0][:count]
            if len(set(ids)) >= DISTINCT:
                return torch.tensor([ids])
            report.say(f"the tokenizer knows too few of the words: {len(set(ids))} distinct tokens")
            break
    report.say(f"compared on {count} random token ids")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (1, count), generator=generator)


def _own_model(hf: Path, config: RunConfig) -> "nn.Module":
    """Our transformers model with the weights of a folder of any family."""
    import torch

    from megatron_lt2.hf.configuration_lt2 import LT2Config
    from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM

    source = open_hf(hf)
    model = LT2ForCausalLM(LT2Config(**lt2_config_values(config))).float()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for mapping in lt2_mappings(config.model):
            parts = mapping.convert(source.read(mapping.source))
            for name, tensor in zip(mapping.targets, parts, strict=True):
                own.pop(name).copy_(tensor)
    assert not own, f"not filled: {', '.join(own)}"
    return model.eval()


def _their_model(hf: Path) -> "nn.Module":
    """The model that a folder names, with its own code.

    Raises:
        ValueError: transformers does not know it and the folder has no code, or it cannot be made.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            hf, trust_remote_code=True, dtype=torch.float32
        ).eval()
    except Exception as error:  # code from elsewhere raises anything
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{hf}: its own model cannot be loaded ({reason}); --against own compares without it"
        ) from None


def _recorded(layers: Any, run: Callable[[], Any]) -> tuple[Any, list["Tensor"]]:
    """What `run` returns, and the outputs of the layers in the order in which they ran."""
    outputs: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        return run(), outputs
    finally:
        for hook in hooks:
            hook.remove()


def _compare_outputs(
    report: Report,
    source: Path,
    reference: Any,
    ids: "Tensor",
    config: RunConfig,
    max_kl: float,
) -> None:
    import torch

    from megatron_lt2.training import one_process

    with torch.no_grad():
        theirs, their_layers = _recorded(reference.model.layers, lambda: reference(ids).logits)
        model = one_process.load_model(source)
        try:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            ours, our_layers = _recorded(model.decoder.layers, lambda: model(ids, positions))
        finally:
            one_process.close()
    for number, (one, other) in enumerate(zip(our_layers, their_layers, strict=False)):
        one = one.transpose(0, 1)
        off = ((one - other).norm() / other.norm()).item()
        if not off < DEPARTED:
            loop, layer = divmod(number, config.model.num_layers)
            report.say(
                f"layer {layer} of loop {loop} is the first to depart: relative difference "
                f"{off:.3g}",
                good=False,
            )
            break
    if len(our_layers) != len(their_layers):
        report.say(
            f"layers run: {len(our_layers)} in the checkpoint, {len(their_layers)} in the folder",
            good=False,
        )
    p = theirs.double().log_softmax(-1)
    q = ours[..., : p.shape[-1]].double().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    worst, same = divergence.max().item(), (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    report.say(
        f"logits on {ids.shape[1]} tokens: KL a token {divergence.mean().item():.2g} nats on "
        f"average and {worst:.2g} at most (allowed {max_kl:g}), largest difference "
        f"{(theirs - ours[..., : p.shape[-1]]).abs().max().item():.2g}, same next token at "
        f"{same:.1%}",
        good=worst <= max_kl,
    )
