"""The tools around the SmolLM2 linearisation: text, cloze words, table, fit."""

import gzip
import json
import math
from types import SimpleNamespace

import pytest

from benchmarks.linearize import cloze, main
from benchmarks.linearize_study import fit, report
from benchmarks.linearize_study import main as study


def test_text_is_read_once_and_without_markup(tmp_path, capsys):
    folder = tmp_path / "doc"
    folder.mkdir()
    text = "A plain page of documentation. " * 20
    (folder / "a.txt").write_text(text)
    (folder / "again.txt").write_text(text)
    (folder / "b.gz").write_bytes(gzip.compress(("packed " * 80).encode()))
    (folder / "c.html").write_text(f"<html><script>x</script><p>{'word &amp; ' * 60}</p></html>")
    (folder / "short.txt").write_text("too short")
    (folder / "d.txt").write_bytes(b"\xff\xfe" * 300)
    out = tmp_path / "out.jsonl"
    assert main(["text", "--input", str(folder), "--output", str(out)]) == 0
    found = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert len(found) == 3 and "3 documents" in capsys.readouterr().out
    assert not any("<" in t or "script" in t for t in found)


def test_words_that_have_occurred_before_are_asked_for():
    words = ["\u0120alpha", "\u0120of", "\u0120be", "ta", ".", "\u0120alpha", "\u0120of"]
    words += ["\u0120be", "ta", "\u0120gamma"]
    backend = SimpleNamespace(id_to_token=lambda i: sorted(set(words))[i])
    labels = [sorted(set(words)).index(w) for w in words]
    tokenizer = SimpleNamespace(backend=backend)
    # "of" has two letters; "gamma" is new; "beta" has two tokens.
    assert list(cloze(labels, len(labels), tokenizer)) == [[5], [7, 8]]
    assert list(cloze(labels, 5, tokenizer)) == []


def _evaluation(**changes):
    facts = {"name": "x", "tokens": 6e6, "kl": 0.5, "perplexity": 9.0, "teacher_perplexity": 8.0}
    return {**facts, "cloze": 0.3, "teacher_cloze": 0.4, **changes}


def test_table(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(_evaluation()))
    assert main(["table", str(path)]) == 0
    assert "| x | 6.0M | 0.5000 | 9.00 | 8.00 | 30.0% | 40.0% | 75.0% |" in capsys.readouterr().out


def test_the_fit_finds_the_exponents(tmp_path):
    points = [
        {"parameters": n, "tokens": d, "kl": 3 * n**-0.2 * d**-0.1, "recovery": 0.5}
        for n in (1e8, 4e8, 2e9)
        for d in (6e6, 2e7, 6e7)
    ]
    found = fit(points)
    assert found["a"] == pytest.approx(0.2) and found["b"] == pytest.approx(0.1)
    assert found["c"] == pytest.approx(3) and found["error"] < 1e-9
    assert fit(points[:2])["b"] == pytest.approx(0.1) and "a" not in fit(points[:2])
    assert fit([points[0], points[4]]) is None
    for i, (size, budget) in enumerate([("135m", "6e6"), ("135m", "20e6"), ("360m", "6e6")]):
        facts = _evaluation(tokens=float(budget), kl=0.5 / (i + 1))
        (tmp_path / f"gdn-{size}-{budget}.json").write_text(json.dumps(facts))
    assert study([str(tmp_path)]) == 0
    text = (tmp_path / "study.md").read_text()
    assert "| gdn | 3 |" in text and (tmp_path / "study.png").stat().st_size > 1000
    assert study([str(tmp_path / "nowhere")]) == 2
    nothing = [{"mixer": "gdn", "size": "135m", "recovery": math.nan, **points[0]}]
    assert "nan%" in report([{**nothing[0], "recovery": math.nan}])
