"""What checks find: declared once as a `Kind`, told with a place and with evidence as a `Finding`."""

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct, structs


class Severity(IntEnum):
    """By harm."""

    #: Good to know; everything works.
    NOTE = 0
    #: Works, and wastes something or will break.
    WARNING = 1
    #: Decisions are made from wrong or missing knowledge.
    ERROR = 2
    #: Requests fail, or can be abused.
    CRITICAL = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Finding(Struct, frozen=True, kw_only=True):
    """`where` are ids of endpoints, or names of what else is meant; empty = the whole installation."""

    code: str
    severity: Severity
    what: str
    evidence: str = ""
    fix: str = ""
    #: A page of the documentation, with the place in it.
    docs: str = ""
    where: tuple[str, ...] = ()


class Kind(Struct, frozen=True):
    """What can be found. `code` is `check.name` and does not change between versions."""

    code: str
    severity: Severity
    what: str
    fix: str
    docs: str = "docs/doctor.md"

    def at(self, where: str = "", evidence: str = "", fix: str = "") -> Finding:
        return Finding(
            code=self.code,
            severity=self.severity,
            what=self.what,
            evidence=evidence,
            fix=fix or self.fix,
            docs=self.docs,
            where=(where,) if where else (),
        )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """What is the same at several places as one finding, with the evidence of the first; the most harmful first."""
    groups: dict[tuple[str, str, str], Finding] = {}
    for one in findings:
        key = one.code, one.what, one.fix
        known = groups.get(key)
        groups[key] = one if known is None else structs.replace(known, where=(*known.where, *one.where))
    return sorted(groups.values(), key=lambda one: -one.severity)
