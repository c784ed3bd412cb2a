"""Whether an endpoint's KV events may be believed: what they predicted against what the engine then reported.

Rules
* Only informative pairs count: something was predicted or something reported, and the prediction did not rest on a
  prompt that was still on its way there.
* Some error is normal: between decision and computing, blocks come and go. A pair agrees within one block or a tenth
  of the prompt, whichever is more.
* `PROOFS` agreements in a row make an endpoint proven. It is distrusted once more than half of the last `WINDOW` pairs
  disagree, three of them at least, and believed again after `RECOVERY` agreements in a row.
* A silent zero (nothing predicted, much reported) is the mark of keys that can never match. An engine under pressure
  makes errors in both directions; a broken recipe makes them all the time.
"""

from collections import deque

PROOFS = 3
WINDOW = 16
RECOVERY = 4
_LEAST = 3
_TOLERANCE = 0.1


class Trust:
    """Of one endpoint."""

    __slots__ = ("_row", "_window", "distrusted", "proven")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The engine is another one: nothing is known of it yet."""
        self._window: deque[bool] = deque(maxlen=WINDOW)
        #: Agreements since the last disagreement.
        self._row = 0
        self.proven = False
        self.distrusted = False

    @property
    def level(self) -> float:
        """Share of the last pairs that agreed; 0.5 while there are none."""
        return sum(self._window) / len(self._window) if self._window else 0.5

    @property
    def settled(self) -> bool:
        """Proven, and nothing speaks against it: a sample of answers is enough to go on."""
        return self.proven and self._row >= WINDOW

    def judge(self, agrees: bool) -> bool:
        """Take one pair. True: the verdict has changed."""
        before = (self.proven, self.distrusted)
        self._window.append(agrees)
        self._row = self._row + 1 if agrees else 0
        if self.distrusted:
            if self._row >= RECOVERY:
                self.distrusted, self.proven = False, True
                self._window.clear()
                self._window.extend([True] * RECOVERY)
        elif self._row >= PROOFS:
            self.proven = True
        if not self.distrusted:
            wrong = len(self._window) - sum(self._window)
            if wrong >= _LEAST and 2 * wrong > len(self._window):
                self.distrusted, self.proven = True, False
        return (self.proven, self.distrusted) != before


def agrees(predicted: int, reported: int, prompt: int, block_size: int) -> bool:
    """Within the tolerance of the module's rules. All in tokens."""
    return abs(predicted - reported) <= max(block_size, _TOLERANCE * prompt)
