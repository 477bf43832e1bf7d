"""One tiny corpus with tokenizer and token files for all runs, and whole runs to compare with."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from data_prep.build import tokenize_files
from tests.e2e.runs import Ended, call, command, write_config
from tests.unit.tiny_text import request as tokenize_request
from tests.unit.tiny_text import write_jsonl, write_tokenizer

NOUNS = ["parser", "loop", "layer", "token", "model", "file", "error", "value"]
VERBS = ["reads", "writes", "keeps", "drops", "returns", "calls"]


def _documents(count: int) -> list[str]:
    pick = random.Random(0)
    return [
        " ".join(
            f"The {pick.choice(NOUNS)} {pick.choice(VERBS)} the {pick.choice(NOUNS)}."
            for _ in range(pick.randint(3, 12))
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tokenizer/, corpus.* (60 documents), two.* (2 short ones) and config.yaml."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = write_tokenizer(folder / "tokenizer", 300)
    for name, texts in {"corpus": _documents(60), "two": ["A few words.", "Some more."]}.items():
        source = write_jsonl(folder / f"{name}.jsonl", texts)
        tokenize_files(tokenize_request([source], tokenizer, folder / name))
    write_config(folder / "config.yaml", folder / "corpus")
    return folder


@pytest.fixture(scope="session")
def config(data: Path) -> tuple[str, Path]:
    """The arguments that name the tiny configuration."""
    return "--config", data / "config.yaml"


@pytest.fixture(scope="session")
def undisturbed(
    config: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[Path, Ended]]:
    """Run folder and end of a whole run on so many ranks, started from the command line."""

    @cache
    def run(ranks: int) -> tuple[Path, Ended]:
        folder = tmp_path_factory.mktemp("undisturbed") / f"ranks{ranks}"
        argv = command(*config, "--run_dir", folder, ranks=ranks if ranks > 1 else None)
        return folder, call(argv)

    return run
