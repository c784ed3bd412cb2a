"""Tokenisers, the pieces of prompts that they keep, and whether engines agree, on the metrics page."""

from collections.abc import Callable, Mapping

from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import counters, gauges
from fairlead.tokens import PromptTokeniser

_STATES = ("agrees", "differs", "unknown")


class TokenMetrics:
    """`tokeniser` gives what is loaded now; `parity` a state of each compared model."""

    def __init__(
        self,
        registry: Registry,
        tokeniser: Callable[[], PromptTokeniser],
        parity: Callable[[], Mapping[str, str]],
        without: Mapping[str, int] | None = None,
    ) -> None:
        self._tokeniser, self._parity, self._without = tokeniser, parity, without
        self._loaded = gauges("model", "tokeniser", "template")
        self._agreement = gauges("model", "state")
        self._bytes, self._asked, self._found = gauges(), counters(), counters()
        self._unread = counters("reason")
        registry.before(self._refresh)
        show = registry.show
        text = "1 for the library and the template that a model's prompts are read with; none = they are not."
        show("fairlead_tokens_model", text, self._loaded)
        text = "1 for whether an engine was found to make the same token ids of probes as we do."
        show("fairlead_tokens_parity", text, self._agreement)
        show("fairlead_tokens_cache_bytes", "Pieces of prompts whose tokens are kept.", self._bytes)
        show("fairlead_tokens_cache_asked_total", "Characters that were looked for among them.", self._asked)
        show("fairlead_tokens_cache_found_total", "Characters that were found among them.", self._found)
        if without is not None:
            text = "Prompts whose token ids are not known, so that their tokens were estimated, by reason."
            show("fairlead_tokens_missing_total", text, self._unread)

    def _refresh(self) -> None:
        self._loaded.children.clear()
        self._agreement.children.clear()
        tokeniser = self._tokeniser()
        for name, model in tokeniser.states().items():
            library = model.tokeniser.library if model.tokeniser is not None else "none"
            template = "ok" if model.templates else "none"
            self._loaded.child(name, library, template).set(1)
        for served, found in self._parity().items():
            for state in _STATES:
                self._agreement.child(served, state).set(float(found == state))
        cache = tokeniser.cache
        if cache is not None:
            self._bytes.child().set(cache.bytes)
            self._asked.child().value = cache.asked
            self._found.child().value = cache.found
        for reason, count in (self._without or {}).items():
            self._unread.child(reason).value = count
