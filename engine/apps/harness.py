"""The adapter for lm-evaluation-harness (`pip install 'cake-infer[lm-eval]'`): its model `cake` is our engine.

`cake-lm-eval` is its command line, `lm_eval`, with the model added: lm_eval 0.4.13 finds none in other packages. Later
releases do, by the entry point group `lm_eval.models`, and then `lm_eval --model cake` is the same.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ...errors import CakeError, OptionError, PromptError
from ..generation import GenerationConfig

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ..continuation import Scored
    from ..engine import Engine

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # the command says so; every module of the package can be imported without its extras
    TemplateLM = object

log = logging.getLogger(__name__)

NAME = "cake"
MISSING = "lm-evaluation-harness is not installed: pip install 'cake-infer[lm-eval]'"
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_GEN_TOKS = 256  # as in lm_eval's other models
SEED = 1234
ROUND = 4  # batches that are given to the engine at once: where a reply ends, the next prompt takes its place
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SHAPES_CACHE = frozenset({"budget", "policy", "indicator", "allocation", "heads", "merge", "kv_memory"})


class CakeLM(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods and replies over a cache within a budget.

    A context is read as a prompt is: evicted to the budget before its continuation is scored or its reply is written.
    `model` is a folder, an alias or a hub id (`pretrained` is another word for it); all else are the keywords of
    `Engine.load`. batch_size: how many replies are written together at most, "auto" is 16. max_length: the most tokens
    of a text, the engine's `context`. truncate: cut the beginning of contexts that are too long, as lm_eval's other
    models do, instead of raising PromptError. seed: of sampled replies; each repeat of a request gets the next one.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = DEFAULT_MAX_GEN_TOKS,
        truncate: bool = False,
        seed: int = SEED,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        if TemplateLM is object:
            raise CakeError(MISSING)
        super().__init__()
        if model is not None and pretrained is not None:
            raise OptionError("model and pretrained are two words for the same: give one")
        self._batch_size = _batch_size(batch_size, max_batch_size)
        if engine is None:
            from ..engine import Engine

            if max_length is not None:
                if "context" in options:
                    raise OptionError("max_length and context are two words for the same: give one")
                options["context"] = max_length
            options["device"] = _device(options.get("device"))
            engine = Engine.load(str(model or pretrained or DEFAULT_MODEL), **options)
        self.engine = engine
        self.max_gen_toks, self._truncate, self._seed = max_gen_toks, truncate, seed
        self._asked = SHAPES_CACHE & {name for name, value in options.items() if value is not None}
        self._cut = 0

    # -- what lm_eval asks a model for --------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """The most tokens of context and continuation together."""
        return self.engine.context

    @property
    def eot_token_id(self) -> int:
        ends = self.engine.text_tokenizer().eos_ids or self.engine.config.eos_token_ids
        return int(ends[0])

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        first = self.engine.text_tokenizer().bos_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.model_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; by default with the BOS that the tokenizer puts in front, never two."""
        return self.engine.text_tokenizer().encode(string, add_bos=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's template: lm_eval keeps it with the results."""
        if isinstance(chat_template, str):
            raise OptionError(f"the model has one chat template, not one called {chat_template!r}")
        return self.engine.chat_template().source if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Without the generation prompt its last message is one that will be gone on with.

        A text as lm_eval wants it: what a message spells is not told from control tokens, unlike in `Engine.chat`.
        """
        template = self.engine.chat_template()
        rendered = template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return rendered
        begun = chat_history[-1]["content"].strip()
        start = rendered.rfind(begun)
        if start < 0:
            raise PromptError("the model's chat template changes the last message: it cannot be gone on with")
        return rendered[: start + len(begun)]

    # -- log-likelihoods ----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Contexts that are equal are read once, whatever stands behind them."""
        behind: dict[tuple[int, ...], list[int]] = {}
        for number, (_key, before, continuation) in enumerate(requests):
            behind.setdefault(tuple(self._fitting(before, len(continuation))), []).append(number)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with _progress(len(requests), "loglikelihood", disable_tqdm) as progress:
            for context, numbers in behind.items():
                found = self._scored(context, [requests[number][2] for number in numbers])
                for number, scored in zip(numbers, found, strict=True):
                    answers[number] = sum(scored.logprobs), scored.greedy
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
                progress.update(len(numbers))
        self._tell_cut()
        return answers

    def _scored(self, context: Sequence[int], continuations: list[list[int]]) -> list[Scored]:
        from ..continuation import score_continuations

        return score_continuations(self.engine.runner, context, continuations)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows as long as the context.

        Nothing stands before such a text, so that there is nothing to evict: a budget is applied by `hold` alone, whose
        new tokens take the slots of others. With `grow` a budget that was asked for, and is shorter than the text, is
        an OptionError.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        answers = []
        with _progress(len(requests), "loglikelihood_rolling", disable_tqdm) as progress:
            for (text,) in (request.args for request in requests):
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,  # which counts what is predicted; the prefix stands in front
                    context_len=1,
                )
                total = 0.0
                for context, continuation in map(make_disjoint_window, windows):
                    self._check_rolling(len(continuation))
                    total += sum(self._scored(context, [continuation])[0].logprobs)
                answers.append(total)
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
                progress.update()
        return answers

    def _check_rolling(self, tokens: int) -> None:
        cache = self.engine.cache
        if not self._asked or cache.policy == "full" or cache.decode_policy == "hold":
            return
        from ...cache.budget import Budget

        budget = None if cache.kv_memory is not None else Budget.parse(cache.budget).tokens(tokens, cache.window)
        if budget is None or tokens > budget:
            raise OptionError(
                "a rolling log-likelihood has no context in front that could be evicted, so that the cache would keep "
                f"all {tokens:,} tokens: set the option policy to full, or the option decode_policy to hold"
            )

    # -- replies ------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Replies that end before any of the texts in `until`, at an end token, or after max_gen_toks tokens."""
        repeats: Counter[str] = Counter()
        prompts, configs = [], []
        for context, given in (request.args for request in requests):
            seed = self._seed + repeats[f"{context}\n{given!r}"]
            repeats[f"{context}\n{given!r}"] += 1
            config = self._generation(given, seed)
            prompts.append(self._fitting(self.tok_encode(context), config.max_new_tokens or 0))
            configs.append(config)
        self._tell_cut()
        answers: list[str] = []
        with _progress(len(requests), "generate_until", disable_tqdm) as progress:
            for start in range(0, len(requests), ROUND * self._batch_size):
                part = slice(start, start + ROUND * self._batch_size)
                results = self.engine.generate(list(prompts[part]), config=configs[part], batch=self._batch_size)
                for request, result in zip(requests[part], results, strict=True):
                    answers.append(result.text)
                    self.cache_hook.add_partial("generate_until", request.args, result.text)
                progress.update(len(results))
        return answers

    def _generation(self, given: dict[str, Any], seed: int) -> GenerationConfig:
        """What lm_eval's gen_kwargs say, in our words. Raises OptionError for what would not be applied."""
        options = {name: value for name, value in given.items() if value is not None}
        until = options.pop("until", [])
        stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
        lengths = [options.pop(name) for name in LENGTHS if name in options]
        sampling = options.pop("do_sample", None)
        temperature = float(options.pop("temperature", 0.0 if not sampling else 1.0))
        known = {field.name for field in fields(GenerationConfig)} - {"logprobs", "stop", "max_new_tokens"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionError(f"gen_kwargs has {unknown[0]!r}, which the engine does not have")
        return GenerationConfig(
            max_new_tokens=int(lengths[0]) if lengths else self.max_gen_toks,
            temperature=0.0 if sampling is False else temperature,
            stop=stop,
            **{"seed": seed, **options},
        )

    # -- lengths ------------------------------------------------------------------------------------------------------

    def _fitting(self, context: list[int], room: int) -> list[int]:
        """The context; its end where it is too long and may be cut, with room for so many tokens behind it."""
        most = self.max_length - room
        if len(context) <= most or not self._truncate:
            return context
        if most < 1:
            raise PromptError(f"{room:,} tokens behind a context are more than the model's {self.max_length:,}")
        self._cut += 1
        return context[-most:]

    def _tell_cut(self) -> None:
        if self._cut:
            log.warning("the beginning of %d contexts was cut: they are longer than %d", self._cut, self.max_length)
        self._cut = 0


def _batch_size(asked: int | str | None, most: int | None) -> int:
    from ..together import BATCH, MOST_TOGETHER

    if asked is None or (isinstance(asked, str) and asked.startswith("auto")):
        return min(MOST_TOGETHER, most or MOST_TOGETHER)
    try:
        return int(BATCH.parse(str(asked)))
    except ValueError as error:
        raise OptionError(f"batch_size is auto, or {str(error).removeprefix('must be ')}") from None


def _device(asked: str | None) -> str | None:
    """lm_eval gives cuda:0 to every model of which nobody said where it should run."""
    import torch

    if asked == "cuda:0" and not torch.cuda.is_available():
        log.info("there is no CUDA device: running on the CPU")
        return None
    return asked


def _progress(total: int, what: str, disabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=f"Running {what} requests", disable=disabled)


def register() -> None:
    """Make `cake` known to lm_eval, where it is not yet."""
    from lm_eval import models  # noqa: F401  its own models first: it fills an empty registry when a name is looked up
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME)(CakeLM)


def main() -> int:
    """`cake-lm-eval`: the command line of lm_eval with the model `cake`. An error of ours is one line."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        print(f"error: {MISSING}", file=sys.stderr)
        return 1
    register()
    try:
        cli_evaluate()
    except CakeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
