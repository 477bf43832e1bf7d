"""Layer patterns: the grammar, and what is refused."""

import pytest

from megatron_lt2.model.pattern import cut_off, expand_pattern, loop_windows

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
        ("0*gdn", ["'0*gdn' makes no layer; leave it out"]),
        ("0*gdn+full", ["'0*gdn' makes no layer; leave it out"]),
        ("GDN+full", ["unknown mixer 'GDN'; did you mean 'gdn'?"]),
        ("gnd", ["unknown mixer 'gnd'; did you mean 'gdn'?"]),
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


@pytest.mark.parametrize(
    "pattern, layers, lost",
    [
        ("4*gdn+full", 21, None),
        ("4*gdn+full", 5, None),
        ("4*gdn+full", 4, "full"),
        ("full+2*gdn+full", 3, None),
        ("2*gdn+full", 1, "full"),
        (["gdn", "full"], 2, None),
    ],
)
def test_a_mixer_that_is_cut_off_is_found(pattern, layers, lost):
    problem = cut_off(pattern, layers)
    if lost is None:
        assert problem is None
    else:
        assert f"so that {lost} gets no layer" in problem and f"num_layers {layers}" in problem


MORE = ("full", "window", "gdn", "nsa")


@pytest.mark.parametrize(
    "pattern, layers, expected",
    [
        ("full+[gdn]+full", 5, "full gdn gdn gdn full"),
        ("2*full + [4*gdn+window] + nsa", 9, "full full gdn gdn gdn gdn window gdn nsa"),
        ("full+[gdn]", 3, "full gdn gdn"),
        ("[gdn+window]+full", 4, "gdn window gdn full"),
        ("[gdn]", 2, "gdn gdn"),
    ],
)
def test_what_is_in_brackets_fills_the_layers_between_the_ends(pattern, layers, expected):
    assert expand_pattern(pattern, layers, MORE) == expected.split()
    assert cut_off(pattern, layers) is None


@pytest.mark.parametrize(
    "pattern, layers, message",
    [
        ("full+[gdn]+full", 2, "its ends take 2 layers of model.num_layers 2"),
        ("full[gdn]full", 5, "cannot read the brackets of 'full[gdn]full'; write one pair"),
        ("full+[gdn", 5, "cannot read the brackets of 'full+[gdn'"),
        ("[gdn]+[full]", 5, "cannot read the brackets of '[gdn]+[full]'"),
        ("full+[[gdn]]", 5, "cannot read the brackets of"),
        ("full+[]+full", 5, "cannot read ''"),
        ("full+[3*gdn+window]", 4, "room for 3, so that window gets no layer; use more layers"),
        ("full+[gnd]", 4, "unknown mixer 'gnd'; did you mean 'gdn'?"),
        ("gdn+window=8", 4, "window=8 gives a size, which only 'window' has in a pattern with"),
        ("full=8->window", 4, "full=8 gives a size"),
        ("full->window=0", 4, "a window of 0 tokens sees nothing"),
        ("full->gdn", 4, "layer 0 is full and gdn in different loops; loops share weights"),
        ("gdn+full->full+gdn", 4, "layer 0 is gdn and full in different loops"),
        ("full->", 4, "cannot read ''"),
        ("full->window=-3", 4, "cannot read 'window=-3'"),
    ],
)
def test_refuses_brackets_and_loops_that_make_no_sense(pattern, layers, message):
    with pytest.raises(ValueError) as error:
        expand_pattern(pattern, layers, MORE)
    assert str(error.value).startswith(f"model.pattern {pattern!r}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "pattern, names, windows",
    [
        ("full->window=128", "full full", [[None, None], [128, 128]]),
        ("window->window=3", "window window", [[7, 7], [3, 3]]),
        ("gdn+full -> gdn+window", "gdn full", [[None, None], [None, 7]]),
        ("window+[gdn]->full+[gdn]", "full gdn", [[7, None], [None, None]]),
    ],
)
def test_masks_that_differ_between_loops(pattern, names, windows):
    assert expand_pattern(pattern, 2, MORE) == names.split()
    assert loop_windows(pattern, 2, 2, 7, MORE) == windows


def test_a_part_for_every_loop():
    assert loop_windows("gdn+window", 2, 3, 7, MORE) is None
    assert loop_windows(["full", "window"], 2, 3, 7, MORE) is None
    with pytest.raises(ValueError, match="has 2 parts for model.loops 3; write one part, or one"):
        loop_windows("full->window", 2, 3, 7, MORE)
