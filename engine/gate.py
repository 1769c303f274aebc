"""The numeric gate on an MTP head: does it agree with its trunk on text?

Structure cannot tell a head whose norms are off by one or whose inputs are swapped: it loads, the
trunk goes on speaking fluently, and nothing is ever accepted. So the head is tried before it is
used, through the very cycle that will use it: the model writes a short text and the share of first
drafts accepted must clear a floor. Healthy heads are reported at 70 to 90 % (greedy), wired wrongly
at 0 to 5 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import Engine, RowSpec, SamplingParams
from engine.solo import generate

FLOOR = 0.25
"""Share of first drafts accepted below which the head is not used. Far below any healthy head and
far above chance, so that neither hangs on the text."""

_ROWS = 4
_TOKENS = 40
_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class MtpVerdict:
    """Outcome of the gate."""

    accepted: int
    drafted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def passed(self) -> bool:
        return self.rate >= FLOOR

    def __str__(self) -> str:
        share = f"{self.accepted} of {self.drafted} first drafts accepted ({self.rate:.0%})"
        if self.passed:
            return f"MTP gate passed: {share}"
        return (
            f"MTP gate failed: {share}, floor {FLOOR:.0%}; drafting is off. A wrong norm "
            "convention, concat order or hidden variant looks like this"
        )


def validate_mtp_support(engine: Engine, start: int) -> MtpVerdict:
    """Let the model write from token `start` and count accepted first drafts.

    Rows differ by seed; they write at temperature 0.7, because greedy text soon repeats itself,
    and on repetition any head agrees. Raises whatever the engine raises.
    """
    rows = min(_ROWS, engine.info.max_rows)
    tokens = min(_TOKENS, engine.info.context_length - 2)
    requests = [
        (
            [start],
            RowSpec(
                sampling=SamplingParams(temperature=_TEMPERATURE, seed=seed), max_tokens=tokens
            ),
        )
        for seed in range(rows)
    ]
    results = generate(engine, requests, depth=min(2, engine.info.max_depth))
    return MtpVerdict(
        accepted=sum(result.accepted[0] for result in results if result.accepted),
        drafted=sum(result.drafted[0] for result in results if result.drafted),
    )
