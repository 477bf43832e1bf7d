"""Layer patterns: the grammar, and what is refused."""

import pytest

from megatron_lt2.model.pattern import expand_pattern

KNOWN = ("full", "gdn")


@pytest.mark.parametrize(
    "pattern, layers, expected",
    [
        ("gdn", 3, ["gdn", "gdn", "gdn"]),
        ("gdn+full", 3, ["gdn", "full", "gdn"]),
        ("2*gdn+full", 5, ["gdn", "gdn", "full", "gdn", "gdn"]),
        ("full+2*gdn+full", 4, ["full", "gdn", "gdn", "full"]),
        (" 2 * gdn + full ", 3, ["gdn", "gdn", "full"]),
        ("4*gdn+full", 2, ["gdn", "gdn"]),
        ("0*gdn+full", 2, ["full", "full"]),
        (["full", "gdn"], 2, ["full", "gdn"]),
    ],
)
def test_expansion(pattern, layers, expected):
    assert expand_pattern(pattern, layers, KNOWN) == expected


def test_the_papers_hybrid_has_full_attention_at_every_fifth_layer():
    names = expand_pattern("4*gdn+full", 21, KNOWN)
    assert [i for i, name in enumerate(names) if name == "full"] == [4, 9, 14, 19]
    assert names.count("gdn") == 17


def test_a_list_is_copied():
    given = ["gdn", "full"]
    expand_pattern(given, 2, KNOWN).append("gdn")
    assert given == ["gdn", "full"]


@pytest.mark.parametrize(
    "pattern, words",
    [
        ("", ["model.pattern ''", "write it like 4*gdn+full"]),
        ("gdn+", ["cannot read ''"]),
        ("4*", ["cannot read '4*'"]),
        ("gdn*4", ["cannot read 'gdn*4'"]),
        ("-1*gdn", ["cannot read '-1*gdn'"]),
        ("4:1", ["cannot read '4:1'"]),
        ("0*gdn", ["has no layer", "write it like 4*gdn+full"]),
        ("gdn+mamba", ["unknown mixer 'mamba'", "known are full, gdn"]),
        (["gdn", "mamba"], ["unknown mixer 'mamba'"]),
        (["gdn"], ["lists 1 mixers", "model.num_layers 2", "make the two equal"]),
        ([], ["lists 0 mixers"]),
    ],
)
def test_refusals(pattern, words):
    with pytest.raises(ValueError, match="model.pattern") as caught:
        expand_pattern(pattern, 2, KNOWN)
    for word in words:
        assert word in str(caught.value)
