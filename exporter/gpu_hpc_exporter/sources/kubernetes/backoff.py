"""How long to wait before a server is asked again."""

from __future__ import annotations

import random
from typing import Final

LONGEST_S: Final = 600.0
"""However long a server asks to wait."""
SETTLED_S: Final = 30.0
"""A connection that lasted as long was a good one, however it ended."""


class Backoff:
    """Doubles from `first_s` to `longest_s`, less up to a half by chance, so that 2,000 nodes do not return at once."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def wait_s(self, lasted_s: float, asked_s: float = 0.0) -> float:
        """Seconds to wait after a connection that lasted so long, by a server that asked for `asked_s`."""
        if lasted_s >= SETTLED_S:
            self._next_s = self._first_s
        wait = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311  no secret
        self._next_s = min(2 * self._next_s, self._longest_s)
        return max(wait, min(asked_s, LONGEST_S) * random.uniform(1.0, 1.1))  # noqa: S311  no secret
