"""Rules of the user's: regular expressions over what processes say of themselves, whose named groups name the job.

The text is the workload's own, so whoever runs one chooses what the expressions run over. They are RE2's, as in
Prometheus: their time grows with the text's length and no faster, whatever the expression, where Python's would let
one command line hold up the whole exporter for hours. What they see is bounded besides: `MAX_TEXT` characters each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpu_hpc_exporter.model import Evidence, JobKind

MAX_TEXT: Final = 4096
"""Characters of a command line or a cgroup file that rules look at."""
GROUPS: Final = ("job", "job_id", "kind", "user", "namespace", "pod", "container", "rank")
"""Named groups that a rule may have: fields of a job."""


class RuleError(ValueError):
    """A rule that cannot be used; the text says which expression, and why."""


class RuleText(Protocol):
    """A rule as configured: expressions, "" for none, each of which must be found in what it is named after."""

    @property
    def command_line(self) -> str: ...

    @property
    def user(self) -> str: ...

    @property
    def cgroup(self) -> str: ...

    @property
    def kind(self) -> JobKind: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A compiled rule. `patterns`: what each expression is about, and the expression."""

    patterns: tuple[tuple[str, Any], ...]
    kind: JobKind = ""

    def match(self, evidence: Evidence) -> dict[str, str] | None:
        """What the groups caught, without those that caught nothing; None where the rule does not apply."""
        found: dict[str, str] = {"kind": self.kind}
        for about, pattern in self.patterns:
            match = pattern.search(_TEXTS[about](evidence))
            if match is None:
                return None
            found |= {name: text for name, text in match.groupdict().items() if text}
        return {name: text for name, text in found.items() if text}


_TEXTS: Final = {
    "command_line": lambda evidence: _legible(evidence.command),
    "user": lambda evidence: _legible(evidence.user),
    "cgroup": lambda evidence: _legible(evidence.cgroup),
}


def _legible(text: str) -> str:
    """Odd bytes would be no text to RE2 at all."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


def compile_rules(rules: Iterable[RuleText]) -> tuple[Rule, ...]:
    """Compile each expression once. Raises RuleError."""
    return tuple(_compile(number, rule) for number, rule in enumerate(rules, 1))


def _compile(number: int, rule: RuleText) -> Rule:
    texts: Mapping[str, str] = {"command_line": rule.command_line, "user": rule.user, "cgroup": rule.cgroup}
    patterns = tuple((about, _pattern(number, about, text)) for about, text in texts.items() if text)
    if not patterns:
        raise RuleError(f"rule {number}: needs at least one of {', '.join(texts)}")
    return Rule(patterns, rule.kind)


def _pattern(number: int, about: str, text: str) -> Any:
    import re2  # noqa: PLC0415  3 MB and 5 ms that only users of rules pay

    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        told = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise RuleError(f"rule {number}, {about} `{text}`: {told} (expressions are RE2's)") from error
    except UnicodeEncodeError as error:
        raise RuleError(f"rule {number}, {about}: no valid text") from error
    unknown = sorted(set(pattern.groupindex) - set(GROUPS))
    if unknown:
        raise RuleError(f"rule {number}, {about}: named group `{unknown[0]}`: expected one of {', '.join(GROUPS)}")
    return pattern
