"""Loading tokenizers: which token ends a document, how large ids get, what is refused."""

import json
import os

import pytest
from tiny_text import TEXTS, write_tokenizer, write_word_tokenizer

from megatron_lt2.atomic import sha256_file
from megatron_lt2.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_folder_and_its_json_mean_the_same(folder):
    whole = load_tokenizer(folder)
    single = load_tokenizer(folder / "tokenizer.json")
    assert (whole.eos_id, whole.eos_token, whole.bos_id) == (0, "<|endoftext|>", None)
    assert whole.sha256 == single.sha256 == sha256_file(folder / "tokenizer.json")
    assert single.eos_id == 0
    assert whole.vocab_size == single.vocab_size == 350
    assert whole.path == str(folder)
    assert [path.name for path in whole.files] == ["tokenizer.json", "tokenizer_config.json"]


def test_encode_decode_round_trip(folder):
    tokenizer = load_tokenizer(folder)
    batch = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(ids) for ids in batch] == TEXTS
    assert all(0 <= token < tokenizer.vocab_size for ids in batch for token in ids)


def test_stored_truncation_and_padding_are_switched_off(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    plain = tokenizer.encode_batch(TEXTS)
    tokenizer.backend.enable_truncation(3)
    tokenizer.backend.enable_padding(pad_id=1, pad_token="<|pad|>", length=50)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode_batch(TEXTS) == plain


def test_vocab_size_is_the_largest_id_plus_one(tmp_path):
    added = write_word_tokenizer(tmp_path / "added.json", {"a": 0, "b": 1}, eos="<eos>")
    tokenizer = load_tokenizer(added)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (2, 3)
    gaps = write_word_tokenizer(tmp_path / "gaps.json", {"a": 0, "b": 70_000}, eos="<eos>")
    assert load_tokenizer(gaps).vocab_size == 70_001


@pytest.mark.parametrize("eos", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"])
def test_eos_of_a_bare_json_is_a_known_added_token(tmp_path, eos):
    path = write_word_tokenizer(tmp_path / "bare.json", {"a": 0, "b": 1}, eos=eos)
    assert load_tokenizer(path).eos_token == eos


def test_first_known_eos_wins(tmp_path):
    path = write_word_tokenizer(tmp_path / "bare.json", {"a": 0}, eos="<|im_end|>")
    tokenizer = load_tokenizer(path)
    tokenizer.backend.add_special_tokens(["<|endoftext|>"])
    tokenizer.backend.save(str(path))
    assert load_tokenizer(path).eos_token == "<|endoftext|>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "b", "bos_token": "a"}),
        ("tokenizer_config.json", {"eos_token": {"content": "b"}, "bos_token": {"content": "a"}}),
        ("special_tokens_map.json", {"eos_token": "b", "bos_token": "a"}),
        ("generation_config.json", {"eos_token_id": 1, "bos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": [1, 0], "bos_token_id": 0}),
    ],
)
def test_eos_and_bos_named_by_a_companion_file(tmp_path, name, content):
    write_word_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "b": 1}, eos="</s>")
    (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.eos_token, tokenizer.bos_id) == (1, "b", 0)
    assert tmp_path / name in tokenizer.files


def break_nothing(folder):
    (folder / "tokenizer.json").unlink()


def break_json(folder):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])


def break_config(folder):
    (folder / "tokenizer_config.json").write_text('{"eos_token": ')


def break_config_kind(folder):
    (folder / "tokenizer_config.json").write_text("[]")


def break_eos(folder):
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')


def break_all_eos(folder):
    write_word_tokenizer(folder / "tokenizer.json", {"a": 0, "</s>": 1})
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (break_nothing, "", "no tokenizer.json in this folder"),
        (break_json, "tokenizer.json", "not a tokenizer.json"),
        (break_config, "tokenizer_config.json", "not valid JSON"),
        (break_config_kind, "tokenizer_config.json", "expected a JSON object"),
        (break_eos, "tokenizer_config.json", "'<nowhere>', which is not in"),
        # A plain word "</s>" is not a special token: text could contain it.
        (break_all_eos, "tokenizer.json", "no EOS token"),
    ],
)
def test_bad_folder_is_one_line_with_the_file(tmp_path, damage, file, words):
    write_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / file if file else tmp_path}: ")
    assert words in message and "\n" not in message


def test_missing_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such tokenizer"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("bare", [False, True])
def test_saved_copy_loads_with_transformers(folder, tmp_path, bare):
    from transformers import AutoTokenizer

    source = folder
    if bare:
        source = tmp_path / "other_name.json"
        source.write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(source)
    copy = tmp_path / "copy"
    written = tokenizer.save(copy)
    assert sorted(path.name for path in written) == sorted(os.listdir(copy))
    again = load_tokenizer(copy)
    assert (again.sha256, again.eos_id) == (tokenizer.sha256, tokenizer.eos_id)

    reference = AutoTokenizer.from_pretrained(copy)
    assert reference.eos_token_id == tokenizer.eos_id
    assert reference.model_max_length > 10**9
    assert reference(TEXTS)["input_ids"] == tokenizer.encode_batch(TEXTS)
    assert len(reference) == tokenizer.vocab_size
    if not bare:
        assert reference.pad_token_id == 1


def test_saving_a_folder_onto_itself_keeps_it(tmp_path):
    write_tokenizer(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    load_tokenizer(tmp_path).save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
