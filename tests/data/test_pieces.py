"""Long documents in pieces: the ids of the whole."""

import random

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep import encoding, pieces
from data_prep.bpe import train_bpe
from data_prep.build import tokenize_files
from data_prep.pieces import Cutter, NoBoundary
from data_prep.stdlib_text import documents
from data_prep.tokenize import main
from megatron_lt2.data.manifest import read_manifest
from megatron_lt2.data.tokenizer import load_tokenizer
from tests.unit.tiny_text import TEXTS, request, write_jsonl, write_tokenizer

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
level, split = pre_tokenizers.ByteLevel, pre_tokenizers.Split
KINDS = {
    "gpt2": (None, level(add_prefix_space=False)),
    "gpt2 with a space in front": (None, level(add_prefix_space=True)),
    "llama3": (None, [split(Regex(LLAMA), "isolated"), level(False, use_regex=False)]),
    "digits": (None, [pre_tokenizers.Digits(True), level(False)]),
    "nfc lower": ([normalizers.NFC(), normalizers.Lowercase()], level(False)),
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "metaspace": (None, pre_tokenizers.Metaspace()),
}
REFUSED = {
    "no pre-tokenizer": (None, None, "does not cut at words"),
    "metaspace whole": (None, pre_tokenizers.Metaspace(split=False), "does not cut at words"),
    "looks back": (None, split(Regex(r"(?<=a) b"), "isolated"), "looks back"),
    "prepends": (normalizers.Prepend("_"), level(False), "where a text begins"),
    "bytes only": (None, level(False, use_regex=False), "does not cut at words"),
}
ODD = [
    "  \n\n ",
    "don't",
    " x\u0301",
    "\u5317\u4eac",
    "!!!\n\n",
    "1234567",
    "\t",
    "\U0001f600",
    " a ",
]


def corpus(size):
    """Real text with odd places mixed in."""
    pick, out, length = random.Random(1), [], 0
    for _, text in documents():
        for start in range(0, min(len(text), 4000), 400):
            out += [text[start : start + 400], pick.choice(ODD) * pick.randint(1, 4)]
            length += 400
        if length > size:
            break
    return "".join(out)


TEXT = corpus(60_000)


def make(normalizer, pre_tokenizer):
    made = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        many = isinstance(normalizer, list)
        made.normalizer = normalizers.Sequence(normalizer) if many else normalizer
    if pre_tokenizer is not None:
        many = isinstance(pre_tokenizer, list)
        made.pre_tokenizer = pre_tokenizers.Sequence(pre_tokenizer) if many else pre_tokenizer
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=level.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT[:20_000]], trainer)
    return made


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 300)
    monkeypatch.setattr(pieces, "WINDOW", 64)


def ids_of(backend, texts):
    return [i for e in backend.encode_batch_fast(texts, add_special_tokens=False) for i in e.ids]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_pieces_are_those_of_the_whole(kind):
    backend = make(*KINDS[kind])
    cutter = Cutter(backend)
    assert cutter.reason() == ""
    cut = cutter.pieces(TEXT)
    assert "".join(cut) == TEXT and len(cut) > 80
    assert ids_of(backend, cut) == ids_of(backend, [TEXT])


@pytest.mark.parametrize("kind", REFUSED)
def test_tokenizers_without_boundaries_refuse_what_is_too_long(kind, monkeypatch):
    *parts, words = REFUSED[kind]
    monkeypatch.setattr(pieces, "MOST_WHOLE", 2000)
    cutter = Cutter(make(*parts))
    assert words in cutter.reason()
    assert cutter.pieces(TEXT[:2000]) == [TEXT[:2000]]
    with pytest.raises(NoBoundary, match=r"2001 characters, and its .*"):
        cutter.pieces(TEXT[:2001])


def test_a_text_without_words_is_refused(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_WHOLE", 2000)
    cutter = Cutter(make(*KINDS["gpt2"]))
    assert len(cutter.pieces("7" * 2000)) == 1
    with pytest.raises(NoBoundary, match="3194 characters without a boundary"):
        cutter.pieces("some words " * 100 + "7" * 3000)


def test_added_tokens_across_a_cut():
    """A token that eats the space behind it moves the cut; one with a space in it forbids all."""
    backend = make(*KINDS["gpt2"])
    backend.add_special_tokens([tokenizers.AddedToken("xyzzy", rstrip=True)])
    text = ("xyzzy " * 7 + "plain words ") * 60
    cut = Cutter(backend).pieces(text)
    assert len(cut) > 3 and ids_of(backend, cut) == ids_of(backend, [text])
    assert not any(piece.endswith("xyzzy") for piece in cut)
    backend.add_special_tokens(["two words"])
    assert "holds whitespace" in Cutter(backend).reason()


def test_a_cut_anywhere_else_would_differ():
    """What the rule is for: pieces of equal length do change ids."""
    backend = make(*KINDS["gpt2"])
    wrong = [TEXT[start : start + 300] for start in range(0, len(TEXT), 300)]
    assert ids_of(backend, wrong) != ids_of(backend, [TEXT])


def test_the_tool_writes_the_same_for_a_long_document(tmp_path, monkeypatch, capsys):
    folder = write_tokenizer(tmp_path / "tok")
    source = write_jsonl(tmp_path / "in.jsonl", ["before", TEXT, "after"])
    monkeypatch.setattr(encoding, "GROUP", 1000)
    tokenize_files(request([source], folder, tmp_path / "out"))
    monkeypatch.setattr(pieces, "PIECE", 1 << 30)
    tokenize_files(request([source], folder, tmp_path / "whole"))
    for suffix in ("bin", "idx"):
        ours, whole = (tmp_path / f"{name}.{suffix}" for name in ("out", "whole"))
        assert ours.read_bytes() == whole.read_bytes()

    monkeypatch.setattr(pieces, "PIECE", 300)
    monkeypatch.setattr(pieces, "MOST_WHOLE", 2000)
    source = write_jsonl(tmp_path / "long.jsonl", ["a", "7" * 3000, "b"])
    words = ["--input", str(source), "--tokenizer", str(folder), "--output", str(tmp_path / "o")]
    assert main([*words, "--workers", "1"]) == 2
    assert f"{source}:2: 3000 characters without a boundary" in capsys.readouterr().err
    assert main([*words, "--workers", "1", "--on-error", "skip"]) == 3
    manifest = read_manifest(tmp_path / "o")
    assert manifest["documents"] == 2
    assert manifest["inputs"][0]["notes"] == {"no_boundaries": 1}


def test_trained_tokenizers_are_cut(tmp_path):
    train_bpe(iter(TEXTS), 300).save(str(tmp_path / "t.json"))
    assert Cutter(load_tokenizer(write_tokenizer(tmp_path / "tok")).backend).reason() == ""
