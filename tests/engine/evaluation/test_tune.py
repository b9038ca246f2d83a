"""`cake-infer tune` finds the best point of the grid, writes it beside the model, and runs of the model use it."""

from __future__ import annotations

import json

import pytest
from cake_infer import CakeError, Engine, cli
from cake_infer.cache.tuned import Tuned, nearest
from cake_infer.engine import tuning
from cake_infer.engine.evaluation import fidelity as module
from cake_infer.engine.evaluation.fidelity import Fidelity

TEXT = "It was a fox that came to the sea, and an owl that flew over the hill. "


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def command(tmp_path, model_folder, home):
    folder = model_folder()
    files = []
    for number in range(2):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(f"{number} " + TEXT * (4 + number))

    def run(*words: str) -> int:
        line = ["tune", "--text", *map(str, files), "--model", str(folder), "--window", "8", "--tokens", "6"]
        return cli.main([*line, "--step", "eager", *words], Engine.load)

    run.folder = folder
    return run


def test_the_best_point_is_written_used_shown_and_can_be_left_out(command, capsys, monkeypatch):
    measured = []
    fidelity = module.fidelity

    def fake(runner, example, cells, **options):
        """The real thing, but that tau 0.6/1.4 with gamma 50 loses nothing."""
        results = fidelity(runner, example, cells, **options)
        measured.append((len(example.prefix), len(cells)))
        names = [cell.policy.describe() for cell in cells]
        assert len(set(names)) == len(names)
        return [
            Fidelity(0.0, *list(vars(one).values())[1:]) if name == "cake tau 0.6/1.4 gamma 50" else one
            for name, one in zip(names, results, strict=True)
        ]

    monkeypatch.setattr(module, "fidelity", fake)
    words = ("--tau1", "0.6", "1", "--tau2", "1.4", "--gamma", "50", "200", "--budget", "24")
    assert command("--policy", "cake", *words) == 0
    assert [count for _, count in measured] == [5, 5], "one prefill for each text, and as it is"
    out = capsys.readouterr()
    assert out.out.index("tau 0.6/1.4, gamma 50") < out.out.index("\nas it is")
    assert "runs of this model with CAKE's allocation use it from now on" in out.err
    path = command.folder / "cake-tuning.json"
    assert json.loads(path.read_text())["cake"] == [{"budget": 24, "tau1": 0.6, "tau2": 1.4, "gamma": 50.0}]
    engine = Engine.load(command.folder, policy="cake", budget=24, window=8, step="eager")
    assert engine.generate(TEXT * 3, max_new_tokens=1).stats.policy == "cake tau 0.6/1.4 (tuned) gamma 50"
    own = Engine.load(command.folder, policy="cake", budget=24, window=8, step="eager", tau1=2.0, tau2=2.0, gamma=200)
    assert own.generate(TEXT * 3, max_new_tokens=1).stats.policy == "cake tau 2/2 gamma 200"
    off = Engine.load(command.folder, policy="cake", budget=24, window=8, step="eager", tuning="off")
    assert off.generate(TEXT * 3, max_new_tokens=1).stats.policy == "cake tau 1/1 gamma 200"


def test_the_default_policy_is_what_is_tuned_and_uses_what_was_found(command, capsys, monkeypatch):
    fidelity, seen = module.fidelity, set()

    def fake(runner, example, cells, **options):
        results = fidelity(runner, example, cells, **options)
        seen.update(cell.policy.describe().split(" tau")[0] for cell in cells)
        return [
            Fidelity(0.0, *list(vars(one).values())[1:]) if "tau 0.6/1.4" in cell.policy.describe() else one
            for one, cell in zip(results, cells, strict=True)
        ]

    monkeypatch.setattr(module, "fidelity", fake)
    assert command("--tau1", "0.6", "--tau2", "1.4", "--budget", "24") == 0
    assert len(seen) == 1
    engine = Engine.load(command.folder, budget=24, window=8, step="eager")
    used = engine.generate(TEXT * 3, max_new_tokens=1).stats.policy
    assert used.startswith("auto tau 0.6/1.4 (tuned)")
    assert used.split(" tau")[0] in seen
    capsys.readouterr()
    assert command("--gamma", "50", "--budget", "24") == 2
    assert "choose a policy that has it: cake" in capsys.readouterr().err


def test_nothing_is_written_where_nothing_is_better(command, capsys):
    assert command("--tau1", "1", "--tau2", "1", "--budget", "24") == 0
    assert "nothing was written" in capsys.readouterr().err
    assert not (command.folder / "cake-tuning.json").exists()


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path, home):
    model = tmp_path / "gone" / "model"  # the folder does not exist: nothing can be written beside it
    first = tuning.write_tuning(model, [Tuned(512, 0.5, 0.6), Tuned(128, 1.0, 2.0)])
    assert first.parent == home / "tuned"
    assert tuning.write_tuning(model, [Tuned(512, 0.7, 0.8, 10.0)]) == first
    assert tuning.read_tuning(model) == (Tuned(128, 1.0, 2.0), Tuned(512, 0.7, 0.8, 10.0))
    assert tuning.read_tuning(tmp_path / "other" / "model") == ()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '{"format": 1}',
        '{"format": 2, "cake": []}',
        '{"format": 1, "cake": [{"budget": 0, "tau1": 1, "tau2": 1}]}',
        '{"format": 1, "cake": [{"budget": 8, "tau1": "a", "tau2": 1}]}',
        '{"format": 1, "cake": [{"budget": 8, "tau1": 1, "tau2": 1, "gamma": -1}]}',
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, home, text):
    (tmp_path / "cake-tuning.json").write_text(text)
    with pytest.raises(CakeError, match=r"cake-tuning\.json is (damaged|of another version): remove it"):
        tuning.read_tuning(tmp_path)


def test_the_nearest_budget_is_that_in_log_scale():
    rows = (Tuned(128, 1, 1), Tuned(1024, 2, 2))
    assert [nearest(rows, budget).budget for budget in (1, 300, 400, 10_000)] == [128, 128, 1024, 1024]
    assert nearest((), 100) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tau1", "0"], "tau1 must be a number above 0"),
        (["--policy", "cake", "--gamma", "-1"], "gamma must be"),
        (["--budget", "4"], "below the window of 8"),
    ],
)
def test_values_that_cannot_be_are_refused(command, capsys, words, message):
    assert command(*words) == 2
    assert message in capsys.readouterr().err
