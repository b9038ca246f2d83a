"""CAKE's allocation (Qin et al., ICLR 2025, arXiv 2503.12491): layers share by dispersion and shift of the window's
attention, `P = H^(1/tau1) * V^(1/tau2)`.

Defaults: tau1, tau2 of the authors' table by model shape and nearest budget, 1/1 for every other model. The authors'
code works the statistics in the model's half precision, where small variances vanish, truncates shares and spreads what
is clipped equally; here they are in fp32 with fp64 sums, and seats are dealt exactly (`budget.deal_seats`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ...errors import CakeError
from ..policies.base import PolicyModel
from ..scores import layer_moments
from ..tuned import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView

# Shape -> budget -> (tau1, tau2), from experiments/LongBench/config/model2tau.json of github.com/antgroup/cakekv.
# A shape stands for every model that has it: Llama 3 shares the row of Llama 3.1.
TAUS: dict[PolicyModel, dict[int, tuple[float, float]]] = {
    PolicyModel("llama", 32, 4096, 128256): {1024: (1.6, 0.4), 128: (1.6, 0.6)},  # Llama 3.1 8B
    PolicyModel("llama", 32, 4096, 32000): {1024: (1.9, 1.8), 128: (0.9, 2.3)},  # Llama 2 7B chat
    PolicyModel("llama", 40, 5120, 32000): {1024: (0.5, 0.4), 128: (1.8, 2.0)},  # Llama 2 13B chat
    PolicyModel("mistral", 32, 4096, 32768): {1024: (0.8, 0.5), 128: (1.0, 0.8)},  # Mistral 7B v0.3
    PolicyModel("qwen2", 28, 3584, 152064): {1024: (1.5, 0.6), 128: (0.4, 0.6)},  # Qwen2.5 7B instruct
}
_LOG_LIMIT = 700.0  # exp(700) is just inside float64


def table_taus(model: PolicyModel, budget: int) -> tuple[float, float]:
    """tau1, tau2 of the authors' table for this model and the nearest budget in log scale; 1.0, 1.0 if not in it."""
    rows = TAUS.get(model)
    if rows is None:
        return 1.0, 1.0
    return rows[min(rows, key=lambda tuned: abs(math.log(tuned / max(budget, 1))))]


def preference(dispersion: float, shift: float, tau1: float, tau2: float) -> float:
    """`dispersion ** (1 / tau1) * shift ** (1 / tau2)`, through logarithms; 0 where either is 0.

    Small taus can leave the range of float64: the logarithm is held within +-700, so the result is finite and above 0.
    """
    if dispersion <= 0 or shift <= 0:
        return 0.0
    log = math.log(dispersion) / tau1 + math.log(shift) / tau2
    return math.exp(min(_LOG_LIMIT, max(-_LOG_LIMIT, log)))


@dataclass(frozen=True)
class CakeAllocation:
    """Layers whose window attends widely and restlessly get more."""

    tau1: float = 1.0
    tau2: float = 1.0
    tuned: bool = field(default=False, compare=False)

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, tau1: float | None, tau2: float | None) -> CakeAllocation:
        """Explicit taus win, one by one, over those that `tune` found, and these over the table."""
        found = nearest(model.tuned, budget)
        table1, table2 = table_taus(model, budget) if found is None else (found.tau1, found.tau2)
        tuned = found is not None and None in (tau1, tau2)
        return cls(table1 if tau1 is None else tau1, table2 if tau2 is None else tau2, tuned)

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """Raises `CakeError` if the layer's attention is not finite."""
        dispersion, shift = layer_moments(view)
        if not (math.isfinite(dispersion) and math.isfinite(shift)):
            raise CakeError(
                f"the attention of layer {view.layer} is not finite: the weights are damaged or overflow their dtype; "
                "try float32 for the option dtype"
            )
        return preference(dispersion, shift, self.tau1, self.tau2)

    def describe(self) -> str:
        return f"tau {self.tau1:g}/{self.tau2:g}{' (tuned)' if self.tuned else ''}"
