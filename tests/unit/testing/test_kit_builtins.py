"""Every built-in plugin keeps the contracts that the kit checks."""

from typing import Any

import pytest

from fairlead.config.builtins import BUILTINS
from fairlead.testing import check_filter, check_picker, check_policy, check_scorer

CHECKS: dict[str, Any] = {
    "filter": check_filter,
    "scorer": check_scorer,
    "picker": check_picker,
    "policy": check_policy,
}
#: Parameters of those that cannot do without.
NEEDED: dict[str, dict[str, Any]] = {
    "by-label": {"label": "zone"},
    "metric": {"metric": "waiting", "better": "low"},
    "metric-limit": {"metric": "kvUsage", "operator": "LessThan", "value": 0.5},
}
PLUGINS = [
    pytest.param(CHECKS[kind], cls, id=f"{kind} {name}")
    for kind in CHECKS
    for name, cls in BUILTINS[kind].items()  # type: ignore[index]
]


@pytest.mark.parametrize(("check", "cls"), PLUGINS)
def test_contract(check: Any, cls: Any) -> None:
    check(cls(cls.Params(**NEEDED.get(cls.type, {})), name="n"))
