"""What stands for one plugin of the reference."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct, field

from fairlead.config.builtins import Kind
from fairlead.plugins.params import NoParams

#: Where a plugin may be named: in a profile, or in the place of that name.
Role = Literal[
    "profile", "handler", "decider", "producer", "control", "flow", "saturation", "source", "extractor", "discovery",
    "parser",
]  # fmt: skip


class Use(Struct, frozen=True):
    """A plugin of ours in its stead. `share` of the configured weight goes to it."""

    kind: Kind
    type: str
    parameters: Any = NoParams()


class Around(Struct):
    """What the document says elsewhere."""

    #: Tokens of a prefix block.
    block: int = 64


class Settings(Struct):
    """What plugins say that is a section of our own: section → field → value, and where each stands."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def set(self, section: str, key: str, value: Any) -> None:
        self.values.setdefault(section, {})[key] = value


class Entry(Struct, frozen=True, kw_only=True):
    """`refused`: naming it stops the start, with this way out. Else it is accepted, and `note` says what is different.

    Deprecated and experimental plugins are accepted as far as that is free.
    """

    role: Role
    #: A second place for it.
    also: Role | None = None
    status: Literal["beta", "alpha", "deprecated"] = "beta"
    #: What does the same here, for people.
    counterpart: str = ""
    params: Any = NoParams
    #: Parameters → plugins for a profile.
    use: Callable[[Any, Around], list[Use]] | None = None
    note: str | Callable[[Any], str] = ""
    refused: str | Callable[[Any], str] = ""
    settings: Callable[[Any, Settings], None] | None = None

    def remark(self, parameters: Any) -> str:
        return self.note if isinstance(self.note, str) else self.note(parameters)

    def refusal(self, parameters: Any) -> str:
        return self.refused if isinstance(self.refused, str) else self.refused(parameters)


Table = Mapping[str, Entry]
