"""An examination as text for people, and as JSON for machines."""

from collections.abc import Iterator
from textwrap import wrap

import msgspec

from fairlead.core.text import plain
from fairlead.doctor.run import Check, Examination, Finding, Severity
from fairlead.doctor.site import NEEDS

#: How many places a finding lists by name.
_MOST_PLACES = 5
_COLOURS = {Severity.CRITICAL: "31;1", Severity.ERROR: "31", Severity.WARNING: "33", Severity.NOTE: "36"}


def as_text(examination: Examination, colour: bool = False, width: int = 0) -> str:
    """The findings, the most harmful first, then a summary. `width`: characters per line; 0 = no limit."""
    return "\n".join([*_lines(examination.findings, colour, width), *_unable(examination), _summary(examination)])


def _lines(findings: tuple[Finding, ...], colour: bool, width: int) -> Iterator[str]:
    for finding in findings:
        word = f"{finding.severity.word:8}"
        word = f"\033[{_COLOURS[finding.severity]}m{word}\033[0m" if colour else word
        yield f"{word}  {finding.code}: {plain(finding.what)}"
        details = {"where": _places(finding.where), "seen": finding.evidence, "do": finding.fix, "read": finding.docs}
        yield from (_wrapped(f"          {name:6}", plain(text), width) for name, text in details.items() if text)
        yield ""


def _wrapped(heading: str, text: str, width: int) -> str:
    """The text wrapped between words, and indented under the heading."""
    left = width - len(heading)
    lines = wrap(text, left, break_long_words=False, break_on_hyphens=False) if left > 0 else [text]
    return heading + f"\n{' ' * len(heading)}".join(lines)


def _places(where: tuple[str, ...]) -> str:
    shown = ", ".join(where[:_MOST_PLACES])
    return f"{shown} and {len(where) - _MOST_PLACES} more" if len(where) > _MOST_PLACES else shown


def _unable(examination: Examination) -> Iterator[str]:
    for outcome in examination.outcomes:
        if outcome.state in ("unfinished", "failed"):
            yield f"{outcome.state}: {outcome.check}: {plain(outcome.detail)}"


def _summary(examination: Examination) -> str:
    counts = {severity: sum(item.severity is severity for item in examination.findings) for severity in Severity}
    counted = ", ".join(f"{count} {severity.word}" for severity, count in reversed(counts.items()) if count)
    ran = [item for item in examination.outcomes if item.state != "skipped"]
    reasons: dict[str, list[str]] = {}
    for item in examination.outcomes:
        if item.state == "skipped":
            reasons.setdefault(item.detail, []).append(item.check)
    left_out = [f"not run: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join([*left_out, f"{len(ran)} checks: {counted or 'nothing found'}"])


def as_json(examination: Examination) -> str:
    """`{"well", "findings": [...], "checks": [...]}`; see docs/doctor.md."""
    findings = [{**msgspec.to_builtins(item), "severity": item.severity.word} for item in examination.findings]
    shown = {"well": examination.well, "findings": findings, "checks": examination.outcomes}
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()


def listed(checks: tuple[Check, ...]) -> str:
    """All checks: what each examines and needs, and what it can find."""
    lines = []
    for check in checks:
        lines.append(f"{check.name}: {check.about}")
        lines += [f"    {kind.severity.word:8}  {kind.code}" for kind in sorted(check.kinds, key=lambda k: -k.severity)]
        lines += [f"    not run where {NEEDS[need]}" for need in check.needs]
    return "\n".join(lines)
