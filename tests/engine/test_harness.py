"""The adapter for lm-evaluation-harness gives its tasks what the engine says, by its command line and on local data."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from cake_infer import Engine, GenerationConfig, OptionError, PromptError
from cake_infer.engine.apps import harness
from cake_infer.engine.continuation import score_continuations

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra lm-eval")

TEXT = "the harbour office keeps watch on channel fourteen, and the pilot boat is blue. " * 2
ROWS = [
    {"text": TEXT + "it keeps watch on", "choices": ["channel fourteen", "channel nine", "it"], "gold": 0},
    {"text": TEXT + "the boat is", "choices": ["red", "blue"], "gold": 1},
    {"text": "one two", "choices": ["three", "four"], "gold": 0},
]
TASKS = {
    "cloze": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
""",
    "replies": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "z"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}
OPTIONS = {"budget": 48, "window": 8, "step": "eager"}


def request(*arguments):
    return SimpleNamespace(args=arguments)


def test_a_run_of_the_command_on_local_data_gives_what_the_engine_says(tmp_path, model_folder):
    folder = model_folder(max_position_embeddings=512)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\ntest_split: test\n"
    )
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"task: {name}{text}{data}", encoding="utf-8")
    code = "import sys; from cake_infer.engine.apps.harness import main; sys.exit(main())"
    words = ["--model", "cake", "--model_args", f"model={folder},budget=48,window=8,step=eager"]
    words += ["--tasks", "cloze,replies", "--include_path", str(tmp_path / "tasks"), "--batch_size", "2"]
    words += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "|cloze" in done.stdout  # its table
    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]
    samples = {}
    for name in TASKS:
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    with Engine.load(folder, **OPTIONS) as engine:
        right = 0
        for row, sample in zip(ROWS, samples["cloze"], strict=True):
            context = engine.encode(row["text"])
            tails = [engine.encode(f"{row['text']} {choice}")[len(context) :] for choice in row["choices"]]
            expected = score_continuations(engine.runner, context, tails)
            found = [(float(answer[0]), answer[1] == "True") for (answer,) in sample["resps"]]
            sums = [sum(one.logprobs) for one in expected]
            assert [value for value, _ in found] == pytest.approx(sums, abs=1e-5)
            assert [greedy for _, greedy in found] == [one.greedy for one in expected]
            right += sums.index(max(sums)) == row["gold"]
        assert scores["cloze"]["acc,none"] == pytest.approx(right / 3)
        for row, sample in zip(ROWS, samples["replies"], strict=True):
            reply = engine.generate(row["text"], max_new_tokens=12, temperature=0.0, stop=("e", "z"))
            assert sample["resps"] == [[reply.text]]
            assert reply.stats.kept_tokens == min(48, len(engine.encode(row["text"])))


def test_an_error_of_the_engine_is_one_line(monkeypatch, capsys):
    def refuse():
        raise PromptError("two\nlines")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refuse)
    assert harness.main() == 1
    assert capsys.readouterr().err == "error: two lines\n"


def test_lm_eval_finds_the_model_by_its_name():
    from lm_eval.api.registry import get_model

    harness.register()
    harness.register()  # twice does no harm
    assert get_model("cake") is harness.CakeLM
    assert get_model("dummy") is not harness.CakeLM  # its own are still there


@pytest.fixture
def model(model_folder):
    with Engine.load(model_folder(max_position_embeddings=512), **OPTIONS) as engine:
        yield harness.CakeLM(engine=engine, batch_size=2)


def test_nothing_evicted_the_likelihood_is_that_of_the_whole_text(model_folder):
    with Engine.load(model_folder(), policy="full", step="eager") as engine:
        model = harness.CakeLM(engine=engine)
        pairs = [("the boat is", " blue"), ("the boat is ", "red"), ("", "the"), ("the boat is", " what all")]
        answers = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
        for (context, continuation), (value, _) in zip(pairs, answers, strict=True):
            text = context + continuation
            tail = len(engine.encode(text)) - (len(engine.encode(context.rstrip())) if context else 1)
            assert value == pytest.approx(sum(engine.score(text)[-tail:]), abs=1e-4)


def test_equal_contexts_are_read_once(model, monkeypatch):
    read = []
    scored = score_continuations
    monkeypatch.setattr(
        "cake_infer.engine.continuation.score_continuations",
        lambda runner, context, tails: read.append(len(tails)) or scored(runner, context, tails),
    )
    pairs = [(TEXT, " one"), ("other", " one"), (TEXT, " two"), (TEXT, " to")]
    model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    assert read == [3, 1]


def test_a_long_text_is_scored_in_windows_that_predict_each_token_once(model_folder):
    text = TEXT * 3
    with Engine.load(model_folder(), policy="full", step="eager", context=100) as engine:
        model = harness.CakeLM(engine=engine)
        (found,) = model.loglikelihood_rolling([request(text)], disable_tqdm=True)
        ids = [model.prefix_token_id, *model.tok_encode(text, add_special_tokens=False)]
    assert len(ids) > 150
    with Engine.load(model_folder("again"), policy="full", step="eager") as engine:
        expected = sum(engine.score(ids[:100]))  # the first window: as long as the context
        last = len(ids) - 100  # the last one ends with the text, and predicts what the first did not
        while last > 0:
            start = max(0, len(ids) - 100) if last <= 99 else len(ids) - last - 1
            count = min(last, 99)
            expected += sum(engine.score(ids[start : start + 100])[-count:])
            last -= count
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_rolling_likelihood_takes_a_budget_with_hold_alone(model_folder):
    with pytest.raises(OptionError, match="policy to full, or the option decode_policy to hold"):
        harness.CakeLM(str(model_folder()), **OPTIONS).loglikelihood_rolling([request(TEXT)], disable_tqdm=True)
    values = [
        harness.CakeLM(str(model_folder(name)), **options).loglikelihood_rolling([request(TEXT)], disable_tqdm=True)[0]
        for name, options in [
            ("full", {"policy": "full", "step": "eager"}),
            ("default", {"step": "eager"}),  # nobody asked for a budget
            ("wide", {**OPTIONS, "budget": 400}),  # nothing would be evicted
            ("hold", {**OPTIONS, "decode_policy": "hold"}),
        ]
    ]
    assert values[1] == values[2] == pytest.approx(values[0], abs=1e-4)
    assert abs(values[3] - values[0]) > 0.01


def test_what_is_asked_of_a_reply_is_applied_or_refused(model, monkeypatch):
    asked = []
    generate = Engine.generate

    def remember(self, prompts, *, config, batch):
        asked.extend((one, batch) for one in config)
        return generate(self, prompts, config=config, batch=batch)

    monkeypatch.setattr(Engine, "generate", remember)
    sampled = {"until": "e", "max_tokens": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    given = [{"until": ["e", "zz"]}, sampled, sampled, {"temperature": 0.7, "do_sample": False, "max_gen_toks": 3}]
    replies = model.generate_until([request("the boat", one) for one in given], disable_tqdm=True)
    assert [one for one, _ in asked] == [
        GenerationConfig(max_new_tokens=256, temperature=0.0, stop=("e", "zz"), seed=1234),
        GenerationConfig(max_new_tokens=5, temperature=0.7, top_p=0.9, stop=("e",), seed=1234),
        GenerationConfig(max_new_tokens=5, temperature=0.7, top_p=0.9, stop=("e",), seed=1235),  # another one
        GenerationConfig(max_new_tokens=3, temperature=0.0, seed=1234),
    ]
    assert {batch for _, batch in asked} == {2}
    assert not any("e" in reply for reply in replies[:3])
    with pytest.raises(OptionError, match="'num_beams', which the engine does not have"):
        model.generate_until([request("the boat", {"until": [], "num_beams": 2})], disable_tqdm=True)
    with pytest.raises(OptionError, match="unknown option 'colour'"):
        harness.CakeLM("smollm2-135m", colour=1)
    with pytest.raises(OptionError, match="two words for the same"):
        harness.CakeLM("a", pretrained="b")
    with pytest.raises(OptionError, match="batch_size is auto, or a whole number"):
        harness.CakeLM("a", batch_size="many")


def test_too_long_a_context_is_refused_or_cut_at_its_beginning(model, caplog):
    long = (TEXT * 8).strip()
    with pytest.raises(PromptError, match="the model's context is 512"):
        model.loglikelihood([request(long, " blue")], disable_tqdm=True)
    cutting = harness.CakeLM(engine=model.engine, truncate=True)
    (answer,) = cutting.loglikelihood([request(long, " blue")], disable_tqdm=True)
    assert "the beginning of 1 contexts was cut" in caplog.text
    ids = model.tok_encode(long + " blue")
    tail = len(ids) - len(model.tok_encode(long))
    (expected,) = score_continuations(model.engine.runner, ids[-512:-tail], [ids[-tail:]])
    assert answer[0] == sum(expected.logprobs)
    (reply,) = cutting.generate_until([request(long, {"max_gen_toks": 12, "until": []})], disable_tqdm=True)
    context = model.tok_encode(long)[-500:]
    assert reply == model.engine.generate(ids=context, max_new_tokens=12, temperature=0.0).text


def test_chats_are_rendered_by_the_models_template(model):
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is "}]
    asked = model.apply_chat_template(chat[:1])
    assert asked.endswith("<|im_start|>assistant\n")
    assert model.tok_encode(asked) == model.engine.encode(messages=chat[:1])
    begun = model.apply_chat_template(chat, add_generation_prompt=False)
    assert begun == asked + "It is"
    assert model.chat_template(True) == model.engine.chat_template().source
    assert math.isfinite(model.loglikelihood([request(begun, " the")], disable_tqdm=True)[0][0])
