"""Conversations as training samples: the tokenizer's chat template, loss on the assistant's tokens.

A conversation is rendered once as a whole. What of it the assistant says is found by rendering its
beginnings: with the messages before an answer and the template's prompt for one, and with the
answer too; the text between is the answer, end-of-turn token included. A token counts if it begins
in there. Templates whose beginnings are not beginnings of the whole are refused.

Conversations follow each other in sequences of sequence_length + 1 tokens, each with a token behind
it at which attention, states and positions restart; one that does not fit in what is left of a
sequence begins the next, and padding carries no loss. A conversation longer than a sequence is cut.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.tokenizer import Tokenizer
from megatron_lt2.distill.settings import ChatSettings

Row = tuple[np.ndarray, np.ndarray]
"""Tokens of a conversation and, for each, whether the assistant says it."""


def chat_datasets(
    chat: ChatSettings, config: RunConfig, tokenizer: Tokenizer
) -> tuple[Dataset[Any], Dataset[Any] | None, int]:
    """Training and validation samples, and the id that ends a conversation.

    Raises:
        ConfigError: no template, no such token, a file that cannot be read, or no answers in it.
    """
    end = tokenizer.backend.token_to_id(chat.document_end)
    if end is None:
        raise ConfigError(
            f"chat.document_end {chat.document_end!r} is no token of {tokenizer.path}; name one"
        )
    template = load_template(tokenizer)
    training = config.training
    made: list[ChatDataset | None] = []
    for files, samples in (
        (chat.train, training.steps * training.global_batch_size),
        (chat.valid, training.eval_batches * training.global_batch_size),
    ):
        paths = [files] if isinstance(files, str) else files
        if not paths or not samples:
            made.append(None)
            continue
        rows = [
            encode_conversation(messages, template, tokenizer, where)
            for where, messages in read_conversations(paths)
        ]
        packed = pack(rows, config.data.sequence_length, end)
        if not packed:
            raise ConfigError(f"{', '.join(map(str, paths))}: no answer of an assistant to learn")
        made.append(ChatDataset(packed, samples, training.seed))
    assert made[0] is not None, "settings are checked for conversations"
    return made[0], made[1], int(end)


def load_template(tokenizer: Tokenizer) -> Any:
    """The chat template of a tokenizer folder: a function of messages and `add_generation_prompt`.

    Raises:
        ConfigError: it has none.
    """
    from transformers import AutoTokenizer

    folder = Path(tokenizer.path)
    folder = folder if folder.is_dir() else folder.parent
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if loaded.chat_template is None:
        raise ConfigError(
            f"{folder}: the tokenizer has no chat template; add chat_template.jinja beside it"
        )

    def render(messages: Sequence[dict[str, str]], prompt: bool) -> str:
        text: str = loaded.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        return text

    return render


def read_conversations(paths: Sequence[str]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Where each conversation stands, and its messages.

    Raises:
        ConfigError: a line is not one.
    """
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                messages = json.loads(line)["messages"]
                known = all(
                    isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages
                )
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise ConfigError(
                    f'{where}: not a conversation; write {{"messages": [{{"role": "user", '
                    '"content": "..."}, ...]}'
                )
            yield where, messages


def encode_conversation(
    messages: list[dict[str, str]], render: Any, tokenizer: Tokenizer, where: str
) -> Row:
    """Tokens of a conversation, and which are the assistant's.

    Raises:
        ConfigError: the template does not render a beginning as a beginning.
    """
    whole = render(messages, False)
    answers = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number], True)
        with_it = render(messages[: number + 1], False)
        if not (whole.startswith(with_it) and with_it.startswith(before)):
            raise ConfigError(
                f"{where}: the chat template renders message {number} in another way when others "
                "follow, so its tokens cannot be told apart; use a template that does not"
            )
        answers.append((len(before), len(with_it)))
    encoding = tokenizer.backend.encode(whole, add_special_tokens=False)
    starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
    own = np.zeros(len(starts), dtype=bool)
    for first, last in answers:
        own |= (starts >= first) & (starts < last)
    return np.array(encoding.ids, dtype=np.int64), own


def pack(rows: Sequence[Row], length: int, end: int) -> list[Row]:
    """Sequences of length + 1 tokens with what is learned in them; those without are left out."""
    packed: list[Row] = []
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []

    def close() -> None:
        filled = sum(map(len, tokens))
        room = length + 1 - filled
        ids = np.concatenate([*tokens, np.full(room, 0 if end else 1)])  # one document
        mask = np.concatenate([*learned, np.zeros(room, dtype=bool)])
        if mask[1:].any():
            packed.append((ids, mask))
        tokens.clear()
        learned.clear()

    for ids, own in rows:
        ids, own = np.append(ids[:length], end), np.append(own[:length], False)
        if tokens and sum(map(len, tokens)) + len(ids) > length + 1:
            close()
        tokens.append(ids)
        learned.append(own)
    if tokens:
        close()
    return packed


class ChatDataset(Dataset[Any]):
    """Samples of packed conversations, every epoch in another order.

    Args:
        packed: of `pack`.
        samples: how many there are of them, over all epochs.
        seed: of the order.
    """

    def __init__(self, packed: list[Row], samples: int, seed: int) -> None:
        self.packed, self.samples, self.seed = packed, samples, seed
        self._order: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(index, len(self.packed))
        if epoch not in self._order:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.packed))
            self._order = {epoch: order}
        tokens, learned = self.packed[self._order[epoch][place]]
        return {
            "tokens": torch.from_numpy(tokens[:-1].copy()),
            "labels": torch.from_numpy(tokens[1:].copy()),
            "loss_mask": torch.from_numpy(learned[1:].astype(np.float32)),
        }
