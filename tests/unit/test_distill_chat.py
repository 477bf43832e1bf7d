"""Conversations as samples: only what the assistant says is learned."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.tokenizer import load_tokenizer
from megatron_lt2.distill.chat import chat_datasets, encode_conversation, load_template, pack
from megatron_lt2.distill.settings import ChatSettings

WORDS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|stop|>", "a", "b", "c", "d", "e"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|stop|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<|endoftext|>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|stop|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(folder)


def _talk(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def test_answers_and_their_end_are_learned_and_nothing_else(tokenizer):
    ids, own = encode_conversation(
        _talk("a b", "c d", "e", "a"), load_template(tokenizer), tokenizer, "x"
    )
    said = [WORDS[i] for i in ids]
    turns = [["<|user|>", "a", "b"], ["<|assistant|>", "c", "d"]]
    turns += [["<|user|>", "e"], ["<|assistant|>", "a"]]
    assert said == [word for turn in turns for word in [*turn, "<|stop|>"]]
    learned = [word for word, mine in zip(said, own, strict=True) if mine]
    assert learned == ["c", "d", "<|stop|>", "a", "<|stop|>"]


def test_a_template_that_rewrites_what_was_said_is_refused(tokenizer):
    def render(messages, prompt):
        return f"{len(messages)} " + " ".join(m["content"] for m in messages)

    with pytest.raises(ConfigError, match="x: the chat template renders message 1 in another way"):
        encode_conversation(_talk("a", "b", "c", "d"), render, tokenizer, "x")


def test_samples_are_masked_and_end_with_documents(tokenizer, tmp_path):
    talks = [
        _talk("a b", "c"),
        _talk("a", "b c d e a b c d e a b c d"),
        _talk("e"),
        _talk("d", "e"),
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    config = RunConfig()
    config.data.sequence_length = 12
    config.training.steps, config.training.global_batch_size = 3, 2
    config.training.eval_batches = 0
    chat = ChatSettings(train=str(path))
    train, valid, end = chat_datasets(chat, config, tokenizer)
    assert valid is None and end == 0 and len(train) == 6
    seen = set()
    for index in range(len(train.packed)):
        sample = train[index]
        assert sample["tokens"].shape == sample["labels"].shape == (12,)
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
        learned = sample["labels"][sample["loss_mask"] > 0].tolist()
        assert learned and not {WORDS.index("<|user|>"), 0} & set(learned)
        seen |= set(learned)
    assert {WORDS[i] for i in seen} <= {"a", "b", "c", "d", "e", "<|stop|>"}
    # Another epoch goes through the same sequences; a second dataset gives the same samples.
    again = chat_datasets(chat, config, tokenizer)[0]
    for index in range(6):
        assert (again[index]["tokens"] == train[index]["tokens"]).all()


def test_packing_breaks_no_conversation_that_fits():
    rows = [(np.arange(4) + 4, np.ones(4, dtype=bool))] * 3
    packed = pack(rows, length=10, end=0)
    assert [ids.tolist() for ids, _ in packed] == [
        [4, 5, 6, 7, 0, 4, 5, 6, 7, 0, 1],
        [4, 5, 6, 7, 0, 1, 1, 1, 1, 1, 1],
    ]
    assert [int(own.sum()) for _, own in packed] == [8, 4]


def test_files_without_conversations_are_refused(tokenizer, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ConfigError, match=r"chat.jsonl:1: not a conversation"):
        chat_datasets(ChatSettings(train=str(path)), RunConfig(), tokenizer)
    with pytest.raises(ConfigError, match="document_end '<eot>' is no token"):
        chat_datasets(ChatSettings(train="x", document_end="<eot>"), RunConfig(), tokenizer)
