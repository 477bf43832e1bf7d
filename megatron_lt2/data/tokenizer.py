"""One way to load a tokenizer, for data preparation, training, export and generation.

Only the `tokenizers` library is used: `transformers` takes seconds to import and adds nothing here.
Notable choices:
- Truncation and padding stored in a tokenizer.json are switched off; otherwise a long document
  would lose its tail without a word.
- `vocab_size` is the largest id that can occur plus one. Added tokens may have ids beyond the
  model's own vocabulary, and tables sized by the latter would be indexed out of range.
- The identity of a tokenizer is the SHA-256 of its tokenizer.json.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lt2.atomic import replace_durably, write_json_atomic

if TYPE_CHECKING:
    import tokenizers

KNOWN_EOS_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Looked for among the added tokens, in this order, when no file names the EOS token."""

UNLIMITED_LENGTH = 10**30
"""What Hugging Face tokenizers write when a tokenizer sets no limit of its own."""

COMPANION_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer and the facts about it that data, model and export must agree on."""

    backend: "tokenizers.Tokenizer"
    path: str
    """The folder or tokenizer.json that was loaded, absolute."""
    sha256: str
    """Over the bytes of tokenizer.json."""
    vocab_size: int
    """Largest possible id + 1."""
    eos_id: int
    eos_token: str
    bos_id: int | None
    files: tuple[Path, ...]
    """Files to keep with a run or an export; `save` copies them."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, nothing added in front or behind."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Copy the tokenizer into `folder` (made if missing) so that transformers loads it there.

        A tokenizer.json that came without a tokenizer_config.json gets one that names the EOS.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for source in self.files:
            is_main = source == self.files[0]
            destination = target / ("tokenizer.json" if is_main else source.name)
            if not (destination.exists() and destination.samefile(source)):
                temporary = target / f".{destination.name}.{os.getpid()}.partial"
                shutil.copyfile(source, temporary)
                replace_durably(temporary, destination)
            written.append(destination)
        config_path = target / "tokenizer_config.json"
        if config_path not in written:
            bos_token = None if self.bos_id is None else self.backend.id_to_token(self.bos_id)
            write_json_atomic(config_path, tokenizer_config(self.eos_token, bos_token=bos_token))
            written.append(config_path)
        return written


def tokenizer_config(
    eos_token: str, *, bos_token: str | None = None, pad_token: str | None = None
) -> dict[str, Any]:
    """Contents of a tokenizer_config.json for a plain tokenizer.json."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": UNLIMITED_LENGTH,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "eos_token": eos_token,
    }
    if bos_token is not None:
        config["bos_token"] = bos_token
    if pad_token is not None:
        config["pad_token"] = pad_token
    return config


def _read_json_object(path: Path) -> dict[str, Any]:
    """A companion file's JSON object, or {} if there is no such file."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """The text of a token written as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _first_id(value: Any) -> int | None:
    """An id written as a number or as a list of alternatives."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _named_token(folder: Path, kind: str) -> tuple[str | int, Path] | None:
    """The EOS or BOS that a folder's files name, as text or id, with the file that says so."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        text = _token_text(_read_json_object(folder / name).get(f"{kind}_token"))
        if text is not None:
            return text, folder / name
    for name in ("generation_config.json", "config.json"):
        token_id = _first_id(_read_json_object(folder / name).get(f"{kind}_token_id"))
        if token_id is not None:
            return token_id, folder / name
    return None


def _resolve(backend: "tokenizers.Tokenizer", named: str | int) -> tuple[int, str] | None:
    """(id, text) of a token given either way; None if the vocabulary has no such token."""
    if isinstance(named, int):
        text = backend.id_to_token(named) if named >= 0 else None
        return None if text is None else (named, text)
    token_id = backend.token_to_id(named)
    return None if token_id is None else (token_id, named)


def _main_file(given: Path) -> Path:
    """The tokenizer.json behind a folder or file name."""
    if not given.exists():
        raise ValueError(f"{given}: no such tokenizer (expected a folder or a tokenizer.json)")
    if not given.is_dir():
        return given
    main = given / "tokenizer.json"
    if not main.exists():
        raise ValueError(
            f"{given}: no tokenizer.json in this folder; a tokenizer kept in another form gets one "
            "by transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return main


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer folder or a tokenizer.json.

    The EOS is what tokenizer_config.json, special_tokens_map.json, generation_config.json or
    config.json beside the tokenizer.json name, in this order; when none does, the added tokens are
    searched for `KNOWN_EOS_TOKENS`.

    Raises:
        ValueError: one line that starts with the file: missing, unreadable, not a tokenizer, or
            without an EOS token.
    """
    import tokenizers

    given = Path(os.path.abspath(os.path.expanduser(path)))
    main = _main_file(given)
    try:
        raw = main.read_bytes()
    except OSError as error:
        raise ValueError(f"{main}: cannot be read: {error.strerror}") from None
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the Rust library raises bare Exception
        reason = " ".join(str(error).split())
        raise ValueError(f"{main}: not a tokenizer.json: {reason}") from None
    backend.no_truncation()
    backend.no_padding()

    files = [main]
    named_eos = named_bos = None
    if main.name == "tokenizer.json":
        # Also when the file itself was named: the folder must not mean another EOS than its file.
        folder = main.parent
        files += [folder / name for name in COMPANION_FILES if (folder / name).is_file()]
        named_eos, named_bos = _named_token(folder, "eos"), _named_token(folder, "bos")

    if named_eos is not None:
        eos = _resolve(backend, named_eos[0])
        if eos is None:
            raise ValueError(
                f"{named_eos[1]}: names the EOS token {named_eos[0]!r}, which is not in "
                f"{main.name}'s vocabulary"
            )
        if named_eos[1].name in ("generation_config.json", "config.json"):
            files.append(named_eos[1])
    else:
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        found = [token for token in KNOWN_EOS_TOKENS if token in added]
        eos = _resolve(backend, found[0]) if found else None
        if eos is None:
            raise ValueError(
                f"{main}: no EOS token: name one as eos_token in tokenizer_config.json beside it, "
                f"or add one of {', '.join(KNOWN_EOS_TOKENS)}"
            )
    bos = None if named_bos is None else _resolve(backend, named_bos[0])
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend=backend,
        path=str(given),
        sha256=hashlib.sha256(raw).hexdigest(),
        vocab_size=max(vocabulary.values()) + 1,
        eos_id=eos[0],
        eos_token=eos[1],
        bos_id=None if bos is None else bos[0],
        files=tuple(files),
    )
