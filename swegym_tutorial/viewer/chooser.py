"""The row that an attempt is chosen with, made of core widgets of ipywidgets. Knows nothing of what is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import ipywidgets

from .episodes import EpisodeList

MOST = 300  # names in the list at once: a browser is slow with many thousands
KINDS = {
    "": "all",
    "resolved": "resolved",
    "not resolved": "not resolved",
    "lost": "infrastructure faults",
    "open": "not graded",
}


class Chooser:
    """Two filters, a list of names, and buttons for the previous and the next one and for what is new."""

    def __init__(
        self,
        episodes: EpisodeList,
        name: str | None,
        show: Callable[[str], None],
        refresh: Callable[[], None],
    ) -> None:
        self._episodes, self._show, self._refresh = episodes, show, refresh
        self._following = False  # whether it is being set, and not chosen from
        self._chosen: list[str] = []  # the names that the filters leave
        narrow = ipywidgets.Layout(width="auto", max_width="16em")
        self.places = ipywidgets.Dropdown(
            description="where", layout=narrow, style={"description_width": "auto"}
        )
        self.kinds = ipywidgets.Dropdown(
            description="outcome", layout=narrow, style={"description_width": "auto"}
        )
        self.list = ipywidgets.Dropdown(
            description="episode",
            layout=ipywidgets.Layout(width="auto", max_width="32em"),
            style={"description_width": "auto"},
        )
        self.previous = _button("Previous", "arrow-left")
        self.next = _button("Next", "arrow-right")
        self.renew = _button("Refresh", "refresh")
        self.word = ipywidgets.Label()
        self.widget = ipywidgets.VBox(
            [
                ipywidgets.HBox([self.places, self.kinds, self.word]),
                ipywidgets.HBox([self.previous, self.list, self.next, self.renew]),
            ]
        )
        self.follow(name)
        for filtered in (self.places, self.kinds):
            filtered.observe(self._on_filter, "value")
        self.list.observe(self._on_list, "value")
        self.previous.on_click(lambda button: self._step(-1))
        self.next.on_click(lambda button: self._step(1))
        self.renew.on_click(lambda button: self._refresh())

    def follow(self, name: str | None) -> None:
        """Offer what there is now, with this name chosen. A filter that it doesn't pass is lifted."""
        place, kind = self.places.value or "", self.kinds.value or ""
        if name is not None:
            place = place if place in ("", self._place(name)) else ""
            kind = kind if kind in ("", self._kind(name)) else ""
        self._offer(place, kind, name)

    def _offer(self, place: str, kind: str, name: str | None) -> None:
        """Set the filters, and the list to what they leave around a name."""
        names = self._episodes.names
        there = [each for each in names if not place or self._place(each) == place]
        kinds = Counter(map(self._kind, there))
        self._chosen = [each for each in there if not kind or self._kind(each) == kind]
        at = self._chosen.index(name) if name in self._chosen else 0
        first = max(0, min(at - MOST // 2, len(self._chosen) - MOST))
        shown = self._chosen[first : first + MOST]
        self._following = True
        try:
            words = dict.fromkeys(map(self._place, names))
            _set(self.places, [(f"all ({len(names):,})", ""), *((each, each) for each in words)], place)
            of_kinds = {each: len(there) if not each else kinds[each] for each in KINDS}
            _set(
                self.kinds,
                [(f"{KINDS[k]} ({n:,})", k) for k, n in of_kinds.items() if n or k in ("", kind)],
                kind,
            )
            _set(self.list, [(self._label(each), each) for each in shown], name if name in shown else None)
        finally:
            self._following = False
        self.previous.disabled = self.next.disabled = len(self._chosen) < 2
        more = f"listed: {first + 1:,} to {first + len(shown):,} of {len(self._chosen):,}; viewer.show(name) goes to any"
        self.word.value = more if len(shown) < len(self._chosen) else ""

    def _place(self, name: str) -> str:
        return self._episodes.place(name).words

    def _kind(self, name: str) -> str:
        ended = self._episodes.ended(name)
        return ended.kind if ended is not None else "open"

    def _label(self, name: str) -> str:
        ended = self._episodes.ended(name)
        return (
            f"{name} · {ended.outcome} · {ended.instance_id}" if ended is not None else f"{name} · not graded"
        )

    def _on_filter(self, change: Any) -> None:
        if self._following:
            return
        self._offer(self.places.value or "", self.kinds.value or "", self.list.value)
        if self.list.value is None and self._chosen:
            self._show(self._chosen[0])

    def _on_list(self, change: Any) -> None:
        if not self._following and change["new"] is not None:
            self._show(change["new"])

    def _step(self, by: int) -> None:
        """Go on to a neighbour in the list; behind the last comes the first."""
        if self._chosen:
            at = self._chosen.index(self.list.value) + by if self.list.value in self._chosen else 0
            self._show(self._chosen[at % len(self._chosen)])


def _set(dropdown: Any, options: list[tuple[str, str]], value: str | None) -> None:
    if dropdown.options != tuple(options):
        dropdown.options = options
    if dropdown.value != value:
        dropdown.value = value


def _button(name: str, icon: str) -> Any:
    return ipywidgets.Button(description=name, icon=icon, layout=ipywidgets.Layout(width="auto"))
