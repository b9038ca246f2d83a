"""Choosing a token from a row of logits."""

from __future__ import annotations

import json
import math

import pytest
import torch
from cake_infer.engine.sampling import (
    GenerationConfig,
    History,
    apply_penalties,
    apply_temperature,
    choose,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    log_distribution,
    log_probabilities,
    resolve_generation,
    sample,
)
from cake_infer.errors import CakeError
from torch import Tensor


def config(**options: float) -> GenerationConfig:
    return resolve_generation(GenerationConfig(**options), None)  # type: ignore[arg-type]


def random_row(size: int = 320, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def kept(row: Tensor) -> list[int]:
    return torch.nonzero(row > -math.inf).squeeze(1).tolist()


# penalties


def test_repetition_penalty_is_applied_once_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    history = History(3)
    for token in (0, 0, 1):
        history.add(token)
    assert apply_penalties(logits, history, 2.0).tolist() == [1.0, -4.0, 1.0]
    assert apply_penalties(logits, History(3, [0, 0, 1]), 2.0).tolist() == [1.0, -4.0, 1.0]
    both = History(3, [0, 1])
    both.add(0)
    assert apply_penalties(logits, both, 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]


def test_penalties_that_are_off_change_not_a_bit() -> None:
    logits = random_row(scale=1e-3)
    history = History(320, range(320))
    for token in range(320):
        history.add(token)
    assert apply_penalties(logits, history, 1.0, 0.0, 0.0) is logits
    assert apply_penalties(logits, None, 2.0, 1.0, 1.0) is logits


def test_presence_and_frequency_count_the_reply_only() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0])
    history = History(4, [0, 0, 1])
    for token in (1, 2, 2, 2):
        history.add(token)
    assert apply_penalties(logits, history, presence=0.5).tolist() == [1.0, 0.5, 0.5, 1.0]
    assert apply_penalties(logits, history, frequency=0.5).tolist() == [1.0, 0.5, -0.5, 1.0]
    assert apply_penalties(logits, history, presence=0.25, frequency=0.5).tolist() == [1.0, 0.25, -0.75, 1.0]


def test_history_counts_tokens_given_as_tensors() -> None:
    history = History(5)
    history.add(torch.tensor([3]))
    history.add(torch.tensor(3))
    history.add(3)
    assert history.reply_counts.tolist() == [0, 0, 0, 3, 0]


def test_penalties_change_the_choice() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0])
    history = History(3, [0])
    assert choose(logits, config(temperature=0.0), history, 0, 0) == 0
    assert choose(logits, config(temperature=0.0, repetition_penalty=1.2), history, 0, 0) == 1
    history.add(0)
    assert choose(logits, config(temperature=0.0, presence_penalty=0.2), history, 0, 0) == 1
    assert choose(logits, config(temperature=0.0, frequency_penalty=0.2), history, 0, 0) == 1


# temperature and filters


def test_temperature_divides() -> None:
    logits = torch.tensor([1.0, 3.0, -1.0])
    assert apply_temperature(logits, 1.0) is logits
    assert torch.softmax(apply_temperature(logits, 0.5), 0).allclose(torch.softmax(logits * 2, 0))
    assert logits.tolist() == [1.0, 3.0, -1.0]


@pytest.mark.parametrize("temperature", [1.1e-5, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    row = apply_temperature(torch.tensor([3e38, -3e38, 1e30]), temperature)
    assert not row.isnan().any()
    assert row.amax() == 0
    assert choose(torch.tensor([1.0, 40.0, 2.0]), config(temperature=1.1e-5), None, 0, 0) == 1


def test_top_k_keeps_exactly_k_and_the_lower_ids_among_equals() -> None:
    row = torch.tensor([1.0, 5.0, 3.0, 3.0, 3.0, 0.0])
    assert kept(filter_top_k(row, 1)) == [1]
    assert kept(filter_top_k(row, 2)) == [1, 2]
    assert kept(filter_top_k(row, 3)) == [1, 2, 3]
    assert kept(filter_top_k(torch.zeros(6), 4)) == [0, 1, 2, 3]
    assert filter_top_k(row, 0) is row
    assert filter_top_k(row, 6) is row
    assert filter_top_k(row, 100) is row


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    row = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    assert kept(filter_top_p(row, 1e-6)) == [1]
    assert kept(filter_top_p(row, 0.49)) == [1]
    assert kept(filter_top_p(row, 0.51)) == [1, 3]
    assert kept(filter_top_p(row, 0.76)) == [1, 2, 3]
    assert kept(filter_top_p(row, 0.95)) == [0, 1, 2, 3]
    assert filter_top_p(row, 1.0) is row
    assert filter_top_p(row, 0.51)[1] == row[1]


@pytest.mark.parametrize("p", [1e-9, 0.0501, 0.4999, 0.9001, 0.9991, 0.9999999])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_sorting_only_what_top_p_can_keep_gives_the_set_of_a_whole_sort(p: float, scale: float) -> None:
    for seed in range(5):
        row = random_row(500, seed, scale)
        row[7] = row[300]
        order = sorted(range(500), key=lambda i: (-row[i].item(), i))
        probabilities = torch.softmax(row.double(), 0).tolist()
        expected, mass = [], 0.0
        for token in order:
            if expected and mass >= p:
                break
            expected.append(token)
            mass += probabilities[token]
        assert kept(filter_top_p(row, p)) == sorted(expected)


def test_min_p_is_relative_to_the_best() -> None:
    row = torch.log(torch.tensor([0.6, 0.31, 0.06, 0.03]))
    assert kept(filter_min_p(row, 0.5)) == [0, 1]
    assert kept(filter_min_p(row, 0.09)) == [0, 1, 2]
    assert kept(filter_min_p(row, 1.0)) == [0]
    assert filter_min_p(row, 0.0) is row


def test_rows_agree_with_transformers() -> None:
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    for seed in range(20):
        row = random_row(seed=seed)
        prompt = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(seed))
        ours = apply_penalties(row, History(320, prompt[0].tolist()), 1.3)
        theirs = RepetitionPenaltyLogitsProcessor(1.3)(prompt, row[None])
        assert torch.equal(ours, theirs[0])
        ours, theirs = apply_temperature(ours, 0.7), TemperatureLogitsWarper(0.7)(prompt, theirs)
        ours, theirs = filter_top_k(ours, 40), TopKLogitsWarper(40)(prompt, theirs)
        assert kept(ours) == kept(theirs[0])
        ours, theirs = filter_top_p(ours, 0.9), TopPLogitsWarper(0.9)(prompt, theirs)
        assert kept(ours) == kept(theirs[0])
        ours, theirs = filter_min_p(ours, 0.05), MinPLogitsWarper(0.05)(prompt, theirs)
        assert kept(ours) == kept(theirs[0])
        assert torch.softmax(ours, 0).allclose(torch.softmax(theirs[0], 0), atol=1e-6)


# the choice


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    assert choose(torch.tensor([0.0, 2.0, 2.0, 1.0]), config(temperature=0.0), None, 5, 0) == 1
    assert choose(torch.tensor([-1.0, -math.inf]), config(temperature=0.0), None, 5, 0) == 0


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}])
def test_filters_down_to_one_token_are_greedy(options: dict[str, float]) -> None:
    for step in range(20):
        row = random_row(seed=step)
        assert choose(row, config(**{"temperature": 1.5, **options}), None, 3, step) == int(row.argmax())


def test_a_row_is_not_changed_by_choosing() -> None:
    row = random_row()
    before = row.clone()
    history = History(320, [1, 2, 3])
    options = config(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3)
    choose(row, options, history, 1, 1)
    log_probabilities(row, 5, 5)
    assert torch.equal(row, before)


def test_choices_follow_the_distribution() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -30.0])
    draws = 4000
    counts = torch.zeros(6)
    for step in range(draws):
        counts[choose(row, config(temperature=0.8), None, 42, step)] += 1
    expected = torch.softmax(row / 0.8, 0) * draws
    assert counts[5] == 0
    chi_square = ((counts - expected) ** 2 / expected)[:5].sum().item()
    assert chi_square < 20  # 4 degrees of freedom, p = 0.0005


def test_filtered_choices_follow_the_renormalised_distribution() -> None:
    row = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05]))
    options = config(temperature=1.0, top_k=4, top_p=0.85)
    draws = 3000
    counts = torch.zeros(5)
    for seed in range(draws):
        counts[choose(row, options, None, seed, 0)] += 1
    assert counts[0] == counts[4] == 0
    expected = torch.tensor([0.4, 0.3, 0.2]) / 0.9 * draws
    assert ((counts[1:4] - expected) ** 2 / expected).sum().item() < 16  # 2 degrees of freedom, p = 0.0003


def test_the_same_seed_repeats_a_text_and_another_does_not() -> None:
    rows = [random_row(seed=step, scale=1.0) for step in range(64)]

    def text(seed: int) -> list[int]:
        return [choose(row, config(temperature=1.0), None, seed, step) for step, row in enumerate(rows)]

    first = text(7)
    other = text(8)
    assert text(7) == first
    assert other != first
    assert text(0) != first
    assert text(0) == text(0)
    assert first[:6] == [65, 150, 31, 183, 1, 110]


def test_equal_rows_at_different_steps_give_different_tokens() -> None:
    row = torch.zeros(320)
    assert len({choose(row, config(temperature=1.0), None, 7, step) for step in range(50)}) > 40


def test_the_callers_generator_is_untouched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for step in range(5):
        choose(random_row(seed=1), config(temperature=1.0, top_p=0.9), None, 1, step)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 5}])
def test_padded_rows_of_the_vocabulary_are_never_chosen(options: dict[str, float]) -> None:
    row = random_row()
    row[310] = 100.0
    for step in range(10):
        assert choose(row, config(**options), None, 0, step, valid=300) < 300
    assert choose(row, config(**options), None, 0, 0) == 310


def test_padding_does_not_change_what_is_drawn() -> None:
    row = random_row(300)
    padded = torch.cat([row, torch.full((20,), 50.0)])
    options = config(temperature=1.3, top_p=0.95, repetition_penalty=1.1)
    for step in range(20):
        plain = choose(row, options, History(300, [1, 2]), 9, step)
        assert choose(padded, options, History(320, [1, 2, 310]), 9, step, valid=300) == plain


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_an_error(options: dict[str, float], bad: float) -> None:
    row = random_row()
    row[17] = bad
    with pytest.raises(CakeError, match=r"NaN.*token 5.*float32"):
        choose(row, config(**options), None, 0, 4)
    with pytest.raises(CakeError, match="NaN"):
        choose(torch.full((320,), bad), config(**options), None, 0, 0)
    with pytest.raises(CakeError, match="NaN"):
        choose(torch.full((320,), -math.inf), config(**options), None, 0, 0)
    row[17] = -math.inf
    assert choose(row, config(**options), None, 0, 0) != 17


def test_bad_logits_in_the_padding_do_not_matter() -> None:
    row = random_row()
    row[310] = math.nan
    assert choose(row, config(temperature=1.0), None, 0, 0, valid=300) < 300


def test_sample_stays_on_the_device_and_takes_the_step_as_a_tensor() -> None:
    row = random_row(scale=0.5)
    options = config(temperature=1.0, top_k=100)
    for step in range(10):
        token = sample(row, options, None, 5, torch.tensor([step]))
        assert token.shape == ()
        assert token.dtype == torch.int64
        assert int(token) == choose(row, options, None, 5, step)


# log-probabilities


def test_log_probabilities_are_of_the_whole_distribution() -> None:
    row = random_row()
    row[300:] = 50.0
    distribution = log_distribution(row, 300)
    assert distribution.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    got = log_probabilities(row, 5, 5, valid=300)
    assert got.id == 5
    assert got.logprob == pytest.approx(distribution[5].item())
    best = distribution.argsort(descending=True)[:5].tolist()
    assert [token for token, _ in got.top[:5]] == best
    assert [value for _, value in got.top[:5]] == pytest.approx(distribution[best].tolist())


def test_the_chosen_token_is_always_among_the_alternatives_once() -> None:
    row = torch.arange(10.0)
    assert [token for token, _ in log_probabilities(row, 0, 3).top] == [9, 8, 7, 0]
    assert [token for token, _ in log_probabilities(row, 8, 3).top] == [9, 8, 7]
    assert log_probabilities(row, 8, 0).top == ()
    assert len(log_probabilities(row, 8, 50).top) == 10
    assert [token for token, _ in log_probabilities(torch.zeros(4), 0, 4).top] == [0, 1, 2, 3]


def test_log_probabilities_are_json_even_where_a_probability_is_zero() -> None:
    row = torch.tensor([0.0, -math.inf, 90.0, -3e38])
    chosen = choose(row, config(temperature=1.0, top_k=1), None, 0, 0)
    got = log_probabilities(row, chosen, 5)
    text = json.dumps([got.logprob, got.top], allow_nan=False)
    assert got.logprob == pytest.approx(0.0)
    assert [1, None] in json.loads(text)[1]
