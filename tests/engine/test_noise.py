"""The random numbers are a function of (seed, step, token) and of nothing else."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from cake_infer.engine.noise import gumbel_noise

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix(x: int) -> int:
    """The finaliser of Vigna's splitmix64.c, in Python integers."""
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def reference(seed: int, step: int, token: int) -> float:
    key = splitmix(splitmix(seed + GOLDEN) + (step + 1) * GOLDEN)
    uniform = ((splitmix(key + (token + 1) * GOLDEN) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def test_the_reference_is_splitmix64() -> None:
    # the first outputs of splitmix64.c for the state 0
    outputs = [splitmix((i + 1) * GOLDEN) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("step", [0, 1, 4095, 2**31 + 5])
def test_noise_is_the_documented_hash(seed: int, step: int) -> None:
    ids = [0, 1, 2, 31999, 151935]
    got = gumbel_noise(seed, step, torch.tensor(ids))
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([reference(seed, step, token) for token in ids], rel=1e-12, abs=1e-12)


def test_noise_never_changes_between_versions() -> None:
    assert gumbel_noise(0, 0, torch.arange(4)).tolist() == pytest.approx(
        [-0.6807578025137786, 3.5293597414235305, -0.24743454082693486, 2.2781398469299243], rel=1e-12
    )
    assert gumbel_noise(7, 3, torch.arange(4)).tolist() == pytest.approx(
        [0.013105363799446624, 0.22364012538808403, -0.9936682129036436, -1.3181814988801648], rel=1e-12
    )


def test_a_step_on_the_device_gives_the_same_numbers() -> None:
    ids = torch.arange(100)
    assert torch.equal(gumbel_noise(7, torch.tensor([12]), ids), gumbel_noise(7, 12, ids))


def test_a_subset_of_ids_gets_the_numbers_of_the_whole() -> None:
    whole = gumbel_noise(3, 9, torch.arange(1000))
    ids = torch.tensor([999, 5, 5, 123])
    assert torch.equal(gumbel_noise(3, 9, ids), whole[ids])
    assert ids.tolist() == [999, 5, 5, 123]


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(11, 0, torch.arange(200_000))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.012)  # 4 standard errors
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.04)
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, bins=64, min=0.0, max=1.0)
    chi_square = ((counts - 3125) ** 2 / 3125).sum().item()
    assert chi_square < 108  # 63 degrees of freedom, p = 0.0003


@pytest.mark.parametrize("neighbour", ["token", "step", "seed"])
def test_neighbours_are_independent(neighbour: str) -> None:
    n = 20_000
    here = gumbel_noise(5, 5, torch.arange(n))
    there = {
        "token": lambda: gumbel_noise(5, 5, torch.arange(1, n + 1)),
        "step": lambda: gumbel_noise(5, 6, torch.arange(n)),
        "seed": lambda: gumbel_noise(6, 5, torch.arange(n)),
    }[neighbour]()
    correlation = torch.corrcoef(torch.stack([here, there]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(n)
    # joint distribution on a 4 x 4 grid of quartiles, 15 degrees of freedom
    cells = (torch.exp(-torch.exp(-here)) * 4).long() * 4 + (torch.exp(-torch.exp(-there)) * 4).long()
    chi_square = ((torch.bincount(cells, minlength=16) - n / 16) ** 2 / (n / 16)).sum().item()
    assert chi_square < 43  # p = 0.0002


def test_global_generators_are_neither_read_nor_advanced() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = gumbel_noise(7, 0, torch.arange(50))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(gumbel_noise(7, 0, torch.arange(50)), first)


def test_threads_do_not_disturb_each_other() -> None:
    ids = torch.arange(3000)
    expected = {seed: gumbel_noise(seed, 2, ids) for seed in range(8)}
    wrong: list[int] = []

    def draw(seed: int) -> None:
        for _ in range(5):
            if not torch.equal(gumbel_noise(seed, 2, ids), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
