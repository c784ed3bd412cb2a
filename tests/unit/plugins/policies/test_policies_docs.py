"""The tutorial's policy works as printed, and docs/policies.md explains every policy."""

import re
from pathlib import Path
from random import Random
from typing import Any

from fairlead.config.builtins import BUILTINS, POLICIES
from fairlead.core.policy import Context
from fairlead.testing import check_policy, fleet, request

DOCS = Path(__file__).parents[4] / "docs"


def test_the_tutorial_policy_works() -> None:
    text = (DOCS / "policy-tutorial.md").read_text()
    code = re.search(r"^```python run file=shortest_wait\.py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    made: dict[str, Any] = {}
    exec(compile(code[1], "shortest_wait.py", "exec"), made)
    policy = made["ShortestWait"]()
    check_policy(policy)
    known = fleet("e0", "e1", samples={"e0": {"running": 3}, "e1": {"running": 0}})
    assert policy.choose(request("hello"), known, Context(0.0, Random(1))).slot == 1
    assert len(code[1].splitlines()) < 40


def test_every_policy_is_explained() -> None:
    text = (DOCS / "policies.md").read_text()
    missing = [name for name in [*BUILTINS["policy"], *POLICIES] if name != "default" and f"`{name}`" not in text]
    assert missing == []
