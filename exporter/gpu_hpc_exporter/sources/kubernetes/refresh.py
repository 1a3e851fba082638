"""When the kubelet is asked next: at a steady beat, and early for what nobody has explained yet."""

from __future__ import annotations

from typing import Final

_MAX_KEYS: Final = 4_096


class Asked:
    """Keys that were asked for lately: whether or not the answer explained one, it is not asked for again."""

    def __init__(self, memory_s: float = 600.0) -> None:
        self._memory_s = memory_s
        self._asked: dict[str, float] = {}

    def is_news(self, key: str, now_s: float) -> bool:
        """Whether to ask for it now; from here on it has been."""
        asked_s = self._asked.get(key)
        if asked_s is not None and now_s - asked_s < self._memory_s:
            return False
        self._asked.pop(key, None)
        self._asked[key] = now_s
        if len(self._asked) > _MAX_KEYS:
            del self._asked[next(iter(self._asked))]
        return True


class RefreshPlan:
    """A beat of `period_s`, and one look-up out of turn for new keys, however many come: `gap_s` between any two."""

    def __init__(self, period_s: float, gap_s: float = 2.0) -> None:
        self._period_s = period_s
        self._gap_s = gap_s
        self._asked = Asked()
        self._began_s: float | None = None
        self._is_early = False

    def ask(self, key: str, now_s: float) -> bool:
        """Whether this key makes the next look-up come earlier."""
        if not self._asked.is_news(key, now_s):
            return False
        self._is_early = True
        return True

    def begin(self, now_s: float) -> None:
        """A look-up begins now."""
        self._began_s = now_s
        self._is_early = False

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next look-up."""
        if self._began_s is None:
            return 0.0
        return max(0.0, self._began_s + (self._gap_s if self._is_early else self._period_s) - now_s)
