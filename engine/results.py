"""From what a step leaves on the device to the contract's plain results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from engine.cycle import FLAG_FAULT, FLAG_LENGTH, FLAG_STOP, TAIL, unpack
from engine.guided import Form
from engine.logprobs import read
from engine.plan import Finish, Logprobs, RowResult, RowSpec
from engine.rows import FIRST_PAD

FAULT_TEXT = "the model produced non-finite logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What prefill chunks of one pass or one cohort of a step leave for the host."""

    rows: tuple[int, ...]
    """Stand-ins (`engine.padding`) come last; they have no results."""
    specs: tuple[RowSpec, ...]
    packed: mx.array | None
    """See `engine.cycle.CycleOutput`; None for a chunk that is not its prompt's last."""
    width: int
    """Token columns of `packed`."""
    logits: mx.array | None = None
    """When traced."""
    chunk: bool = False
    """Whether it is of prefill chunks."""
    prompts: tuple[mx.array | None, ...] = ()
    """Records of each chunk's own tokens, when its row asked and the chunk has any."""
    forms: tuple[Form, ...] = ()
    """Of guided rows, in row order."""

    @property
    def ends(self) -> list[mx.array]:
        """What must be there before it can be read."""
        return [array for array in (self.packed, *self.prompts) if array is not None]

    def read(self) -> list[RowResult]:
        """The rows' results; tells their constraints what was emitted, so call it once."""
        if self.packed is None:
            return [
                RowResult(row=row, prompt_logprobs=self._read_prompt(index))
                for index, row in enumerate(self.rows)
            ]
        packed = np.array(self.packed)
        results = []
        for index, (row, spec) in enumerate(zip(self.rows, self.specs, strict=True)):
            if row <= FIRST_PAD:
                break
            tokens, drafted, accepted, flags = unpack(packed[index].tolist(), self.width)
            result = _result(row, tokens, drafted, accepted, flags)
            if spec.logprobs is not None and tokens:
                records = packed[index, self.width + TAIL :].reshape(self.width, -1)
                result = replace(result, logprobs=read(records[: len(tokens)], spec.logprobs))
            if result.fault is None:
                result = replace(result, prompt_logprobs=self._read_prompt(index))
            results.append(_advanced(self.forms[index], result) if self.forms else result)
        return results

    def _read_prompt(self, index: int) -> Logprobs | None:
        """Log probabilities of a chunk's own tokens; None of a row with broken numbers."""
        asked = self.specs[index].prompt_logprobs
        if asked is None or not self.chunk:
            return None
        records = self.prompts[index]
        if records is None:
            return Logprobs(chosen=(), top_ids=(), top=())
        found = read(np.array(records), asked)
        return found if np.isfinite(found.chosen).all() else None


def _result(
    row: int, tokens: tuple[int, ...], drafted: int, accepted: int, flags: int
) -> RowResult:
    finish = None
    if flags & FLAG_STOP:
        finish = Finish.STOP
    elif flags & FLAG_LENGTH:
        finish = Finish.LENGTH
    result = RowResult(row=row, tokens=tokens, drafted=drafted, accepted=accepted, finish=finish)
    return replace(result, fault=FAULT_TEXT) if flags & FLAG_FAULT else result


def _advanced(form: Form, result: RowResult) -> RowResult:
    """Tell a guided row's constraint what came of the step; a fault of the form names itself."""
    form.advance(result.tokens, ended=bool(result.finish or result.fault))
    return replace(result, fault=form.fault) if result.fault and form.fault else result
