"""Results survive being stopped anywhere, and a file that is something else is left alone."""

from __future__ import annotations

import json
import sys

import pytest
from cake_infer.engine.evaluation.ledger import Ledger, open_ledger
from cake_infer.errors import CakeError

KEY = ("prompt", "policy")
ONE = {"prompt": "a", "policy": "cake", "kl": 0.1}
TWO = {"prompt": "ä", "policy": "cake", "kl": 0.2}


def test_a_rerun_knows_what_is_there(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    ledger = Ledger(path, KEY)
    ledger.append([ONE])
    ledger.append([TWO])
    again = Ledger(path, KEY)
    assert {"prompt": "a", "policy": "cake"} in again
    assert {"prompt": "a", "policy": "snapkv"} not in again
    assert again.get({"prompt": "ä", "policy": "cake"}) == TWO
    assert list(again) == [ONE, TWO]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_last_line_that_was_cut_off_is_dropped_and_written_anew(tmp_path, cut, caplog):
    path = tmp_path / "results.jsonl"
    Ledger(path, KEY).append([ONE, TWO])
    path.write_bytes(path.read_bytes()[:-cut])
    ledger = Ledger(path, KEY)
    assert list(ledger) == [ONE]
    assert "last line is damaged" in caplog.text
    ledger.append([TWO])
    assert list(Ledger(path, KEY)) == [ONE, TWO]
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [ONE, TWO]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"prompt": "a"}', '{"prompt": '])
def test_a_line_in_the_middle_that_is_no_result_is_refused_and_nothing_is_changed(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(f"{json.dumps(ONE)}\n{line}\n{json.dumps(TWO)}\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(CakeError, match="line 2 is no result"):
        Ledger(path, KEY)
    assert path.read_bytes() == before


def test_a_number_that_json_does_not_have_is_never_written(tmp_path):
    ledger = Ledger(tmp_path / "results.jsonl", KEY)
    with pytest.raises(ValueError, match="JSON compliant"):
        ledger.append([ONE | {"kl": float("nan")}])
    assert not (tmp_path / "results.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CakeError, match=r"file is a file, not a folder$"):
            Ledger(folder / "results.jsonl", KEY)
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(CakeError, match="cannot read the results"):
        Ledger(tmp_path / "results.jsonl", KEY)


def test_two_runs_do_not_write_the_same_results(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results.jsonl"
    with open_ledger(path, KEY) as first:
        first.append([ONE])
        with pytest.raises(CakeError, match="another run writes its results to"), open_ledger(path, KEY):
            pass
        with open_ledger(path.with_name("others.jsonl"), KEY):
            pass
        with monkeypatch.context() as without_locks:
            without_locks.setitem(sys.modules, "fcntl", None)
            with open_ledger(path, KEY) as second:
                assert list(second) == [ONE]
    with open_ledger(path, KEY) as after:
        assert list(after) == [ONE]
    for place in (path / "below.jsonl", path.parent):
        with (
            pytest.raises(CakeError, match=r"is a file, not a folder|cannot read the results"),
            open_ledger(place, KEY),
        ):
            pass
