"""The trainer of a stage: an ordinary run whose model has a teacher."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import yaml

from megatron_lt2.atomic import write_text_atomic
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_saved
from megatron_lt2.data.datasets import data_checksums
from megatron_lt2.distill.cache import CachedDataset, CachedFeed, LogitCache, fill
from megatron_lt2.distill.calibrate import calibrate
from megatron_lt2.distill.model import DistilledModel, Objective
from megatron_lt2.distill.plan import Stage, layer_names
from megatron_lt2.distill.settings import Kind
from megatron_lt2.distill.student import MASKED, copy_teacher
from megatron_lt2.distill.teacher import check_same_tokens, load_teacher
from megatron_lt2.kernels.backend import resolve_backend
from megatron_lt2.parallel import platform
from megatron_lt2.training import checkpoint_files, initial_weights
from megatron_lt2.training.loop import Trainer
from megatron_lt2.training.setup import TrainingParts, Variation, build_parts
from megatron_lt2.training.signals import EXIT_SAVED
from megatron_lt2.training.steps import DataFeed

STAGE = "stage.yaml"
"""In a stage's folder: what it minimises, to notice on resume that it was something else."""

OBJECTIVES: dict[Kind, str] = {
    "mixer": "mixer",
    "hidden": "hidden",
    "logits": "logits",
    "long": "logits",
    "sft": "logits",
    "select": "logits",
}


class StageTrainer(Trainer):
    """One stage on one rank.

    Args:
        stage: with everything resolved.
        grouping: see `StudentSettings`.
        Others as Trainer.
    """

    def __init__(self, stage: Stage, grouping: str, *given: Any) -> None:
        self.stage, self.grouping = stage, grouping
        self.stopped = False
        cached = stage.settings.loss.cached
        self.cache = None if cached is None else LogitCache(cached, self._logits_of())
        super().__init__(*given)
        check_same_tokens(
            [*self.config.data.prefixes],
            stage.teacher,
            stage.teacher_model.vocab_size or 0,
            self.tokenizer,
        )
        self.checkpoints.first_weights = self._first_weights

    def datasets(self) -> tuple[Any, Any]:
        """See Trainer; conversations for stage sft."""
        if self.stage.settings.kind == "sft":
            from megatron_lt2.distill.chat import chat_datasets

            chat = self.stage.settings.chat
            self.plain = chat_datasets(chat, self.config, self.tokenizer)
            self.eod = self.plain[2]
        else:
            self.plain = (*super().datasets(), self.eod)
        train, valid, _ = self.plain
        if self.cache is None:
            return train, valid
        self.cache.check()
        cached = CachedDataset(train, self.cache, "train")
        return cached, None if valid is None else CachedDataset(valid, self.cache, "valid")

    def _feed(self, dataset: Any, steps: range, num_workers: int) -> DataFeed:
        feed = super()._feed(dataset, steps, num_workers)
        if not isinstance(dataset, CachedDataset):
            return feed
        return CachedFeed(feed.source, self.config, self.eod, self.parts.model)

    def build(self) -> TrainingParts:
        """A student with its teacher; what is not trained has no gradients."""
        stage = self.stage
        self.check_unchanged()
        kernels = resolve_backend(self.config.precision.kernels, platform.device().type)
        self.teacher = load_teacher(self.config, stage.teacher, stage.teacher_model, kernels)
        rates = tuple(stage.settings.rates.items())
        variation = Variation(DistilledModel, self._prepare, rates)
        return build_parts(self.config, variation)

    def _prepare(self, model: Any) -> None:
        stage = self.stage
        model.pursue(
            Objective(
                self.teacher,
                OBJECTIVES[stage.settings.kind],
                stage.settings.loss,
                stage.mixers,
                self.config.training.steps,
            )
        )
        freeze(model, stage)

    def restore(self) -> None:
        """See Trainer."""
        super().restore()
        self.parts.model.begin_step(self.first_step)
        if self.cache is not None:
            self._make_logits(self.cache)
        if self.log.active:
            write_text_atomic(self.stage.folder / STAGE, yaml.safe_dump(self._facts()))

    def run(self) -> int:
        """See Trainer."""
        if self.stopped:
            self.log.say(f"stopping with logits still to be made: {self.exit_request.reason}")
            return EXIT_SAVED
        return super().run()

    def _logits_of(self) -> dict[str, Any]:
        """What cached logits depend on."""
        config, settings = self.stage.config, self.stage.settings
        chat = [settings.chat.train, settings.chat.valid] if settings.kind == "sft" else None
        return {
            "teacher": str(self.stage.teacher.absolute()),
            "top_k": settings.loss.top_k,
            "data": data_checksums(config),
            "split": config.data.split,
            "conversations": chat,
            "sequence_length": config.data.sequence_length,
            "isolate_documents": config.data.isolate_documents,
            "samples": config.training.steps * config.training.global_batch_size,
            "seed": config.training.seed,
        }

    def _make_logits(self, cache: LogitCache) -> None:
        """The teacher's logits of all samples; then it is let go."""
        training = self.config.training
        if self.log.active:
            cache.note()
        for split, plain, batches in (
            ("train", self.plain[0], training.steps),
            ("valid", self.plain[1], training.eval_batches),
        ):
            samples = batches * training.global_batch_size
            if plain is not None and not self.stopped:
                self.stopped = not fill(cache, split, plain, samples, self.teacher, self)
        self.parts.model.pursue(replace(self.parts.model.objective, teacher=None))
        self.teacher = None

    def _facts(self) -> dict[str, Any]:
        settings = self.stage.settings
        return {
            "kind": settings.kind,
            "teacher": str(self.stage.teacher.absolute()),
            "train": settings.train,
            "rates": dict(settings.rates),
            **{f"loss.{name}": value for name, value in vars(settings.loss).items()},
        }

    def check_unchanged(self) -> None:
        """Refuse to go on with another loss, teacher or choice of parameters.

        Raises:
            ConfigError: names the first that differs.
        """
        path = self.stage.folder / STAGE
        if not path.is_file():
            return
        before = yaml.safe_load(path.read_text())
        for name, value in self._facts().items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{self.stage.folder}: was begun with {name} {before.get(name)!r}, now it is "
                    f"{value!r}; use the old value, or another run_dir"
                )

    def _first_weights(self) -> dict[str, Any]:
        """The teacher's weights, and those of the stage before where there is one."""
        stage, model = self.stage, self.parts.model
        copy_teacher(model, self.teacher, stage.mixers, self.grouping)
        if stage.before is None:

            def batches() -> Any:
                return self._feed(self.plain[0], range(1), 0)

            calibrate(model, self.teacher, stage.mixers, batches)
            source = {"from": f"the teacher {stage.teacher}", "step": 0}
        else:
            source = self._take_over()
        self.parts.optimizer.reload_model_params()
        return source

    def _take_over(self) -> dict[str, Any]:
        """Everything of the stage before but the mixers of layers that are attention again."""
        stage, model = self.stage, self.parts.model
        assert stage.before is not None
        folder = checkpoint_files.newest_complete(stage.before / "checkpoints")
        if folder is None:
            raise ConfigError(f"{stage.before}: has no complete checkpoint to go on from")
        saved = layer_names(load_saved(folder / "run_config.yaml").model)
        restored = changed_layers(saved, stage.mixers, str(folder))
        without = tuple(f"decoder.layers.{i}.self_attention." for i in restored)
        initial_weights.load_model_weights(model, folder, without)
        step = checkpoint_files.read_manifest(folder)["step"]
        return {"from": f"stage {stage.before.name}", "step": step}

    def _unigram(self) -> float | None:
        """A divergence has nothing to do with the entropy of single tokens."""
        return None


def changed_layers(saved: list[str], now: list[str], where: str) -> list[int]:
    """Layers that have full attention instead of the saved linear mixer.

    Raises:
        ConfigError: a layer changes in another way.
    """
    found = []
    for layer, (old, new) in enumerate(zip(saved, now, strict=True)):
        if old == new or {old, new} <= set(MASKED):
            continue
        if new not in MASKED:
            raise ConfigError(
                f"{where}: layer {layer} is {old} there and {new} now; only full attention can "
                "take a mixer's place between stages"
            )
        found.append(layer)
    return found


def freeze(model: Any, stage: Stage) -> None:
    """Leave a gradient only to what the stage trains.

    Raises:
        ConfigError: nothing is left.
    """
    settings = stage.settings
    trained = 0
    for name, parameter in model.named_parameters():
        wanted = parameter.requires_grad and _reached(name, stage)
        if settings.train is not None:
            wanted = wanted and any(fnmatchcase(name, p) for p in settings.train)
        parameter.requires_grad_(wanted)
        trained += wanted
    if not trained:
        raise ConfigError(
            f"stage {settings.label}: train {settings.train} leaves no parameter to train; give "
            "patterns of names such as 'decoder.layers.*.self_attention.*'"
        )


def _reached(name: str, stage: Stage) -> bool:
    """Whether the loss has a gradient for this parameter: one that never comes would be waited
    for."""
    kind = OBJECTIVES[stage.settings.kind]
    if kind == "logits":
        return True
    head, marker, tail = name.partition("decoder.layers.")
    if not marker:
        return False
    number, _, rest = tail.partition(".")
    if kind == "hidden":
        return True
    return rest.startswith("self_attention.") and stage.mixers[int(number)] not in MASKED
