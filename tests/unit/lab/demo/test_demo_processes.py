"""What a child says when it cannot start reaches the user once, without the command line."""

import pytest

from fairlead.core.errors import FairleadError
from fairlead.lab.demo import Child


async def test_the_childs_error_is_told_without_its_prefix() -> None:
    async with Child("serve", "/nowhere/at-all.yaml") as child:
        with pytest.raises(FairleadError) as told:
            await child.ready("http://127.0.0.1:1/", seconds=30.0)
    message = str(told.value)
    assert message.startswith("`fairlead serve` did not become ready: ")
    assert "at-all.yaml" in message
    assert "error:" not in message
