"""Documents that are read once: the same answers as in one go, in any order, from memory and from a file."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
import torch
from cake_infer import Engine, GenerationConfig
from cake_infer.cache.layout import shared_size
from cake_infer.cache.policies import DOCUMENT_POLICY
from cake_infer.cache.snapshot import read_snapshot, write_snapshot
from cake_infer.cli import main
from cake_infer.engine import together
from cake_infer.engine.batch import Batch
from cake_infer.engine.document import open_document
from cake_infer.errors import MemoryLimit, OptionError, PromptError, SnapshotError

DOCUMENT = "the harbour office keeps watch on channel fourteen. " * 8
QUESTIONS = ("en, what of it?", "\n\n1. and the second?", "?!", "a " * 40)
CLOSE = {"rtol": 0, "atol": 1e-4}


def load(folder, **options):
    return Engine.load(folder, **{"window": 8, "budget": 48, "step": "eager", **options})


def messages(content=DOCUMENT):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]


def answers(engine, document, questions=QUESTIONS, **options):
    return [engine.generate(q, cache=document, max_new_tokens=6, temperature=0.0, **options).ids for q in questions]


def told(result):
    """Everything of a result that does not depend on the clock or the machine."""
    stats = dataclasses.replace(result.stats, prefill_s=0, decode_s=0, peak_memory=None, load_s=0)
    return dataclasses.replace(result, stats=stats)


@pytest.mark.parametrize("kind", ["text", "cut word", "messages"])
def test_a_question_feeds_the_tokens_that_the_one_shot_prompt_has_behind_the_document(model_folder, kind):
    engine = load(model_folder())
    text = DOCUMENT if kind == "text" else DOCUMENT.strip(". ")[:-2]
    document = engine.compress(messages=messages()) if kind == "messages" else engine.compress(text)
    for question in QUESTIONS:
        if kind == "messages":
            whole = engine.encode(messages=messages(f"{DOCUMENT}\n\n{question}"))
        else:
            whole = engine.encode(text + question)
        fed = engine.generate(question, cache=document, max_new_tokens=1).prompt_ids
        assert [*document.snapshot.ids, *fed] == whole
        assert len(fed) < len(whole) - len(engine.encode(DOCUMENT)) // 2  # the document is not among them


def test_with_a_budget_that_holds_the_document_the_answer_is_the_one_shot_answer(model_folder):
    engine = load(model_folder(), budget=2000)
    document = engine.compress(messages=messages())
    for question in QUESTIONS:
        whole = engine.generate(messages=messages(f"{DOCUMENT}\n\n{question}"), max_new_tokens=6, temperature=0.0)
        assert engine.generate(question, cache=document, max_new_tokens=6, temperature=0.0).ids == whole.ids


def test_the_answer_sees_what_was_kept_and_all_of_the_question(model_folder, dense, force, random_ids, kept_positions):
    folder = model_folder()
    engine, model = load(folder), dense(folder)
    ids, question, reply = random_ids(150), random_ids(20, seed=1), random_ids(5, seed=2)
    document = engine.compress(ids=ids)
    rows = document.snapshot.rows
    seen = force(reply)
    result = engine.generate(ids=question, cache=document, max_new_tokens=5)
    assert list(result.ids) == reply
    whole = [*ids, *question, *reply[:-1]]
    masks, start = {}, 0
    for layer, head in [(layer, head) for layer in range(rows.length.shape[0]) for head in range(rows.length.shape[1])]:
        kept = rows.position[start : start + int(rows.length[layer, head])].tolist()
        start += len(kept)
        mask = torch.ones(len(whole), len(whole), dtype=torch.bool)
        mask[len(ids) :, : len(ids)] = False
        mask[len(ids) :, kept] = True
        masks[layer, head] = mask
    assert rows.length.mean() == 48  # and so most of the document is gone
    reference = model.logits(whole, masks)[len(ids) + len(question) - 1 :]
    torch.testing.assert_close(torch.stack(seen).double(), reference, **CLOSE)
    assert result.stats.full_tokens == len(ids) + len(question)
    assert result.stats.kept_tokens == 48 + len(question)  # nothing is evicted for a question


@pytest.mark.parametrize("options", [{}, {"decode_policy": "hold"}, {"kv_dtype": "bfloat16"}, {"policy": "ada-kv"}])
def test_questions_in_any_order_from_memory_and_from_a_file_have_the_same_answers(model_folder, tmp_path, options):
    folder = model_folder()
    engine = load(folder, **options)
    document = engine.compress(messages=messages())
    first = answers(engine, document)
    assert answers(engine, document, QUESTIONS[::-1]) == first[::-1]
    document.save(tmp_path / "a.cake")
    assert answers(engine, document) == first  # saving changes nothing
    again = engine.load_document(tmp_path / "a.cake")
    assert answers(engine, again, QUESTIONS[::-1]) == first[::-1]
    with load(folder, **options) as other:
        found = other.load_document(tmp_path / "a.cake")
        assert found.tokens == document.tokens
        assert found.kept_tokens == document.kept_tokens == 48
        assert answers(other, found) == first
        assert other.generate(list(QUESTIONS), cache=found, max_new_tokens=6, temperature=0.0)[1].ids == first[1]
        found.save(tmp_path / "b.cake")  # of what is mapped from the other file
        assert answers(other, other.load_document(tmp_path / "b.cake")) == first


@pytest.mark.parametrize("options", [{}, {"decode_policy": "hold"}, {"kv_bits": 8}, {"policy": "ada-kv"}])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_questions_of_a_list_are_answered_together_as_each_alone(model_folder, tmp_path, monkeypatch, options, batch):
    folder = model_folder()
    with load(folder, **options) as engine:
        document = engine.compress(DOCUMENT)
        configs = [
            GenerationConfig(max_new_tokens=9, seed=1, temperature=0.0, logprobs=1),
            GenerationConfig(max_new_tokens=4, seed=2, temperature=0.9),
            GenerationConfig(max_new_tokens=0, seed=3),
            GenerationConfig(max_new_tokens=7, seed=4, temperature=0.0, repetition_penalty=1.3),
        ]
        questions = [*QUESTIONS[:3], engine.encode(QUESTIONS[3], cache=document)]
        asked = [{"prompt": text} for text in questions[:3]] + [{"ids": questions[3]}]
        alone = [
            engine.generate(**one, cache=document, config=config) for one, config in zip(asked, configs, strict=True)
        ]
        most, step = [], Batch.step
        monkeypatch.setattr(Batch, "step", lambda self: (most.append(len(self)), step(self))[1])
        results = engine.generate(questions, cache=document, config=configs, batch=batch)
        assert max(most) == min(batch, 3)  # the reply of no tokens is over before a step
        assert [told(result) for result in results] == [told(result) for result in alone]
        assert engine.generate([], cache=document) == []


def test_a_list_of_questions_fails_before_the_first_is_read_and_says_which(model_folder):
    with load(model_folder(), context=200) as engine:
        document = engine.compress("the harbour. " * 8)
        engine.stream = None  # nobody is answered alone
        for questions, error, words in (
            (["what?", "a " * 400], PromptError, "prompt 2 of 2: .*200"),
            (["what?", [{"role": "user", "content": "what?"}]], OptionError, "prompt 2 of 2: a question to a document"),
            (["what?", 5], PromptError, "prompt 2 of 2: each prompt"),
            ([[], "what?"], PromptError, "prompt 1 of 2: "),
        ):
            with pytest.raises(error, match=words):
                engine.generate(questions, cache=document, max_new_tokens=2)
        with pytest.raises(OptionError, match="batch says"):
            engine.generate("what?", cache=document, batch=2)
        with pytest.raises(OptionError, match="is a document"):
            engine.generate(["what?"], cache="report.cake")


def test_as_many_questions_are_answered_together_as_memory_has_room_for(model_folder, monkeypatch):
    """Each has its own copy of the document's rows, in the bytes that there are."""
    with load(model_folder()) as engine:
        document = engine.compress(ids=list(range(5, 155)))
        sizes = [engine.runner.fit(open_document(engine, document), 6, 8).size] * 2
        room = shared_size(engine.runner.layout, sizes).nbytes(engine.runner.layout)
        questions = [[7, 8, 9, 10, 11, n] for n in range(5)]
        alone = [engine.generate(ids=ids, cache=document, max_new_tokens=8, temperature=0.0).ids for ids in questions]
        most, largest, step = [], [], Batch.step

        def watched(self):
            most.append(sum(member.arena is not None for member in self._members))
            largest.append(self.arena.nbytes)
            return step(self)

        monkeypatch.setattr(Batch, "step", watched)
        monkeypatch.setattr(together, "_free_for_arena", lambda *_: room)
        found = engine.generate(questions, cache=document, max_new_tokens=8, temperature=0.0)
        assert [result.ids for result in found] == alone
        assert max(most) == 2
        assert max(largest) == room


def test_a_list_of_questions_warns_once_of_other_weights(model_folder, tmp_path, caplog):
    folder = model_folder()
    with load(folder) as engine:
        engine.compress(DOCUMENT).save(tmp_path / "a.cake")
    with load(folder, dtype="bfloat16", kv_dtype="float32") as engine:
        document = engine.load_document(tmp_path / "a.cake")
        caplog.clear()
        engine.generate(list(QUESTIONS[:3]), cache=document, max_new_tokens=2)
        assert sum("was read with" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "asked", "used"),
    [
        ({}, None, DOCUMENT_POLICY),
        ({}, "cake", "cake"),
        ({}, "knorm", "knorm"),
        ({"policy": "snapkv"}, None, "snapkv"),
        ({"policy": "cake"}, None, "cake"),  # chosen, if only by the default's name
        ({"policy": "snapkv"}, "cake", "cake"),
        ({"policy": "cake", "gamma": 100.0}, None, "cake"),
        ({"policy": "cake", "gamma": 100.0}, "knorm", "knorm"),
    ],
)
def test_a_document_is_chosen_from_by_the_policy_for_unknown_questions_or_the_one_that_was_named(
    model_folder, tmp_path, options, asked, used
):
    """The rows, the file and the figures of an answer are those of an engine that was loaded with that policy."""
    folder = model_folder()
    engine = load(folder, **options)
    document = engine.compress(messages=messages(), policy=asked)
    kept = {name: value for name, value in options.items() if name == "gamma" and used == "cake" and asked is None}
    twin = load(folder, policy=used, **kept)
    expected = twin.compress(messages=messages(), policy=used)
    rows, other = document.snapshot.rows, expected.snapshot.rows
    assert rows.length.tolist() == other.length.tolist()
    assert torch.equal(rows.position, other.position)
    assert torch.equal(rows.keys, other.keys)
    document.save(tmp_path / "a.cake")
    loaded = load(folder).load_document(tmp_path / "a.cake")
    assert loaded.policy == expected.policy == twin.runner.policy(48).describe()
    result = load(folder).generate("why?", cache=loaded, max_new_tokens=2)
    assert result.stats.policy == loaded.policy
    assert result.stats.line().endswith(loaded.policy)
    chat = engine.chat()  # other texts of the engine are its own policy's
    list(chat.send(DOCUMENT, max_new_tokens=2))
    assert chat.stats.policy == engine.runner.policy(48).describe()


def test_a_policy_that_a_document_cannot_have_here_is_refused(model_folder):
    engine = load(model_folder())
    for policy, reason in (
        ("squeeze", "when all layers are read"),
        ("full", "engine of its own"),
        ("magic", "unknown"),
    ):
        with pytest.raises(OptionError, match=reason):
            engine.compress(DOCUMENT, policy=policy)
    full = Engine.load(engine.model_path, policy="full", step="eager")
    assert full.compress(DOCUMENT).kept_tokens == full.compress(DOCUMENT).tokens
    with pytest.raises(OptionError, match="engine of its own"):
        full.compress(DOCUMENT, policy="cake")


@pytest.mark.parametrize("hold_by", [None, "cake", "streaming-llm"])
def test_with_hold_a_long_answer_takes_no_further_room(model_folder, force, random_ids, hold_by):
    engine = load(model_folder(), decode_policy="hold", hold_by=hold_by)
    document = engine.compress(ids=random_ids(150))
    force(random_ids(200, seed=3))
    stream = engine.stream(ids=random_ids(20, seed=1), cache=document, max_new_tokens=200)
    next(stream)
    arena = engine.runner.tenancy.arena
    before, nbytes = arena.kept_slots, arena.nbytes
    assert before == document.snapshot.rows.length.sum() + 20 * document.snapshot.rows.length.size
    list(stream)
    assert engine.runner.tenancy.arena is arena
    assert (arena.kept_slots, arena.nbytes) == (before, nbytes)


def test_a_document_outlives_other_work_and_broken_off_answers(model_folder):
    engine = load(model_folder())
    document = engine.compress(DOCUMENT)
    first = answers(engine, document)
    chat = engine.chat()
    list(chat.send("hello", max_new_tokens=4))
    stream = engine.stream("why?", cache=document, max_new_tokens=50)
    next(stream)
    stream.close()
    with pytest.raises(ZeroDivisionError):
        engine.generate("why?", cache=document, on_progress=lambda progress: 1 / 0)
    list(chat.send("and again", max_new_tokens=4))
    assert answers(engine, document) == first
    assert len(chat.messages) == 4


def test_a_template_that_writes_something_else_by_now_leaves_the_document_as_it_was_read(model_folder, caplog):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\nread {{ day }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    engine = load(model_folder(template=template.replace("{{ day }}", "on monday")))
    document = engine.compress(messages=messages())
    expected = engine.generate("why?", cache=document, max_new_tokens=1).prompt_ids
    later = load(model_folder("later", template=template.replace("{{ day }}", "tuesday")))
    object.__setattr__(later, "fingerprint", engine.fingerprint)  # the same weights
    with caplog.at_level(logging.INFO):
        assert later.generate("why?", cache=document, max_new_tokens=1).prompt_ids == expected
    assert "stay as they are" in caplog.text


def test_what_cannot_be_asked_is_refused_and_leaves_the_document_usable(model_folder):
    engine = load(model_folder(), context=600)
    document = engine.compress(messages=messages())
    first = answers(engine, document)
    with pytest.raises(OptionError, match="a text or ids"):
        engine.generate(messages=messages(), cache=document)
    with pytest.raises(PromptError, match="empty"):
        engine.generate("  ", cache=document)
    with pytest.raises(PromptError, match="600"):
        engine.generate("word " * 100, cache=document)
    with pytest.raises(OptionError, match="unknown option"):
        engine.stream("why?", cache=document, sorcery=1)
    for wrong in ("a.cake", 5):
        with pytest.raises(OptionError, match="cache is a document that compress or load_document has returned, not"):
            engine.generate("why?", cache=wrong)
        with pytest.raises(OptionError, match="cache is a document"):
            engine.stream("why?", cache=wrong)
    for wrong in ({}, {"text": "a", "ids": [1]}):
        with pytest.raises(OptionError, match="exactly one"):
            engine.compress(**wrong)
    with pytest.raises(PromptError, match="empty"):
        engine.compress(messages=messages(""))
    with pytest.raises(PromptError, match="the last message is the document"):
        engine.compress(messages=[*messages(), {"role": "assistant", "content": "x"}])
    with pytest.raises(PromptError, match="600"):
        engine.compress(DOCUMENT * 10)
    assert answers(engine, document) == first


def test_another_models_and_another_kind_of_file_are_refused(model_folder, tmp_path):
    engine = load(model_folder(), kv_dtype="float32")
    document = engine.compress(DOCUMENT)
    path = tmp_path / "a.cake"
    document.save(path)
    other = load(model_folder("other", seed=5))
    before = answers(other, other.compress(DOCUMENT))
    with pytest.raises(SnapshotError, match=r"another model \(model\) than other"):
        other.load_document(path)
    with pytest.raises(SnapshotError, match="another model"):
        answers(other, document)
    assert answers(other, other.compress(DOCUMENT)) == before
    with pytest.raises(SnapshotError, match="kv_dtype float32"):
        answers(load(engine.model_path, kv_dtype="bfloat16"), engine.load_document(path))
    with pytest.raises(SnapshotError, match="rope_scaling"):
        answers(load(engine.model_path, rope_scaling="linear:2"), engine.load_document(path))
    with pytest.raises(SnapshotError, match="holds a document, not a chat"):
        engine.chat().load(path)
    chat = engine.chat()
    list(chat.send("hello", max_new_tokens=4))
    chat.save(path)
    with pytest.raises(SnapshotError, match="holds a chat, not a document: go on with it in a chat"):
        engine.load_document(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"source": None}, {"given": "poem"}, {"read": "x"}, {"budget": {}}, {"frequencies": 1}),
        *({"read": value} for value in (10**400, -1, True, 1.5, float("inf"))),
        *({"rotary_length": value} for value in (10**400, 0, -1, True, 1e300, "9" * 400)),
        *({"window": value} for value in (10**400, 0, -1, True, 8.5, "8")),
        *({"budget": value} for value in (10**400, 0, -1, True, 64.5, "64")),
    ],
    ids=str,
)
def test_a_file_that_says_nonsense_of_its_text_is_refused(model_folder, tmp_path, change):
    engine = load(model_folder())
    document = engine.compress(messages=messages())
    saved = document.snapshot
    write_snapshot(tmp_path / "a.cake", type(saved)(saved.rows, saved.ids, saved.queries, {**saved.about, **change}))
    read_snapshot(tmp_path / "a.cake")  # the file itself is sound
    with pytest.raises(SnapshotError):
        answers(engine, engine.load_document(tmp_path / "a.cake"))


def test_kv_memory_holds_for_questions_too(model_folder):
    engine = load(model_folder(), budget=1024, kv_memory="300KiB")
    document = engine.compress(DOCUMENT)
    assert document.kept_tokens < document.tokens
    with pytest.raises(MemoryLimit, match="300KiB"):
        engine.generate("word " * 200, cache=document)
    assert engine.generate("why?", cache=document, max_new_tokens=4).stats.kept_tokens > document.kept_tokens


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(model_folder, tmp_path, capfd):
    folder = model_folder()
    (tmp_path / "book.txt").write_text(DOCUMENT)

    def run(*words):
        code = main([*words, "--model", str(folder), "--step", "eager"])
        out, err = capfd.readouterr()
        return code, out, err

    run.folder, run.at = folder, tmp_path
    return run


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_compress_and_ask_say_what_the_one_shot_command_says(shell, raw):
    book, cake = str(shell.at / "book.txt"), str(shell.at / "book.cake")
    code, out, err = shell("compress", "--prompt-file", book, "--budget", "2000", "-o", cake, *raw)
    assert (code, out) == (0, "")
    assert "book.cake" in err
    assert "--cache" in err
    asked = ("--prompt", "what of it?", "--json", "--max-tokens", "8", "--temperature", "0")
    code, out, err = shell("--cache", cake, *asked)
    assert code == 0, err
    answer = json.loads(out)
    code, out, _ = shell("--prompt-file", book, *asked, *raw)
    whole = json.loads(out)
    assert answer["ids"] == whole["ids"]
    assert answer["prompt_tokens"] < whole["prompt_tokens"] / 4
    assert answer["stats"]["full_tokens"] == whole["stats"]["full_tokens"]


@pytest.mark.parametrize(("words", "used"), [((), DOCUMENT_POLICY), (("--policy", "cake"), "cake")])
def test_compress_names_the_policy_it_used_and_an_answer_does_too(shell, words, used):
    book, cake = str(shell.at / "book.txt"), str(shell.at / "book.cake")
    code, _, err = shell("compress", "--prompt-file", book, "--budget", "64", "-o", cake, *words)
    assert code == 0, err
    policy = read_snapshot(cake).about["policy"]
    assert policy.split()[0].rstrip(",") == used
    assert policy in err
    code, _, err = shell("--cache", cake, "--prompt", "what of it?", "--max-tokens", "4")
    assert code == 0, err
    assert f" | {policy}" in err


def test_the_commands_refuse_in_one_line(shell):
    book, cake = str(shell.at / "book.txt"), shell.at / "book.cake"
    assert shell("compress", "--prompt-file", book, "--budget", "64", "-o", str(cake))[0] == 0
    cut = shell.at / "cut.cake"
    cut.write_bytes(cake.read_bytes()[:-9])
    for words, code, said in (
        (("--cache", str(cut), "--prompt", "x"), 1, "is truncated"),
        (("--cache", str(cake), "--prompt", ""), 2, "needs a question"),
        (("--cache", str(cake), "--prompt", "x", "--budget", "64"), 2, "--budget has no effect with --cache"),
        (("--cache", str(cake), "--prompt", "x", "--policy", "knorm"), 2, "--policy has no effect with --cache"),
        (("--cache", str(cake), "--prompt", "x", "--raw"), 2, "--raw has no effect with --cache"),
        (("compress", "--prompt-file", book), 2, "-o"),
        (("compress", "--prompt-file", book, "-o", str(shell.at / "no" / "a")), 1, "there is no folder"),
        (("compress", "--prompt-file", book, "-o", str(cake), "--raw", "--system", "x"), 2, "--system has no effect"),
    ):
        found, out, err = shell(*words)
        assert (found, out) == (code, ""), err
        assert said in err, err
        assert err.count("\n") == 1, err
    assert (shell.at / "book.cake").exists()
