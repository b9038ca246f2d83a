"""Ask five questions about one document with the full cache and with a budget, side by side.

    .venv/bin/python examples/compare.py
    .venv/bin/python examples/compare.py --budget 256 --model qwen2.5-1.5b

Each question is a run of its own: the document first, the question after it, greedy, with the model's chat template.
The question is thus in the prompt when CAKE decides what to keep, so this shows what a one-shot `cake-infer` does, not
what a cache that was compressed before the question was known can answer. Five facts in one document are an
illustration: too few to tell two policies apart, and no benchmark. An answer counts as found if an accepted spelling
stands in it as a word.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cake_infer import CakeError, Engine, Result, Statistics

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Fact:
    """A question about the document, the accepted answers, and how deep in the document the answer stands."""

    question: str
    answers: list[str]
    fact: str
    depth: float

    def is_in(self, reply: str) -> bool:
        """Whether an accepted answer stands in the reply as a word of its own, in any case of letters."""
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) for answer in self.answers)


@dataclass
class Side:
    """One of the two caches and what came out of it."""

    name: str
    engine: Engine
    found: int = 0
    stats: list[Statistics] = field(default_factory=list)

    def ask(self, document: str, fact: Fact, max_tokens: int) -> Result:
        """One fresh run over document and question."""
        content = f"{document}\n\n{fact.question}"
        result = self.engine.generate(
            messages=[{"role": "user", "content": content}], max_new_tokens=max_tokens, temperature=0.0
        )
        self.found += fact.is_in(result.text)
        self.stats.append(result.stats)
        return result

    def row(self, questions: int) -> str:
        """The line of the table: means over the questions."""
        last = self.stats[-1]
        prefill = sum(s.prompt_tokens for s in self.stats) / sum(s.prefill_s for s in self.stats)
        steps, seconds = sum(s.decode_steps or 0 for s in self.stats), sum(s.decode_s for s in self.stats)
        kept = f"{last.kept_tokens:,.0f} of {last.full_tokens:,}"
        size = f"{last.kept_bytes / 2**20:.1f} MiB"
        decode = f"{steps / seconds:.1f}" if seconds else "-"
        return f"{self.name:<12}{f'{self.found} of {questions}':>8}{kept:>18}{size:>12}{prefill:>10.0f}{decode:>10}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="folder, alias or hub id (default smollm2-135m)")
    parser.add_argument("--budget", default="512", help="tokens per layer and KV head, or a percentage (default 512)")
    parser.add_argument("--policy", default="auto", help="what decides which tokens stay (default auto)")
    parser.add_argument("--document", type=Path, default=HERE / "harbour.md")
    parser.add_argument("--facts", type=Path, default=HERE / "facts.json", help="question, answers, fact and depth")
    parser.add_argument("--max-tokens", type=int, default=48, help="the most tokens of an answer (default 48)")
    parser.add_argument("--threads", type=int, help="CPU threads (default one per core)")
    args = parser.parse_args()
    try:
        compare(args)
    except (CakeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compare(args: argparse.Namespace) -> None:
    document = args.document.read_text(encoding="utf-8").removesuffix("\n")
    facts = [Fact(**entry) for entry in json.loads(args.facts.read_text(encoding="utf-8"))]
    with (
        Engine.load(args.model, policy="full", threads=args.threads) as full,
        Engine.load(args.model, policy=args.policy, budget=args.budget, threads=args.threads) as small,
    ):
        sides = [Side("full cache", full), Side(f"{args.policy} {args.budget}", small)]
        for fact in facts:
            print(f"\n{fact.depth:.0%} deep: {fact.question}  [{fact.answers[0]}]")
            for side in sides:
                before = side.found
                reply = " ".join(side.ask(document, fact, args.max_tokens).text.split())
                print(f"  {side.name:<12}{'found   ' if side.found > before else 'missed  '}{reply}", flush=True)
        head = f"{'':<12}{'found':>8}{'kept per layer':>18}{'KV':>12}{'prefill':>10}{'decode':>10}"
        print(f"\n{head}  (tok/s)")
        for side in sides:
            print(side.row(len(facts)))
        if sides[1].stats[-1].kept_tokens == sides[1].stats[-1].full_tokens:
            print("\nThe budget is not below the prompt: nothing was evicted, and both sides are the same.")
    print("\nFive questions are an illustration, not a benchmark.")


if __name__ == "__main__":
    sys.exit(main())
