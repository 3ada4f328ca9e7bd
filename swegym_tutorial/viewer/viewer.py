"""One attempt of a run at a time, to be read: its issue, turns, patch, tests and tokens.

Shows a live run, a finished one, and one of another process. In a notebook there is a row to choose from, where there
is ipywidgets; elsewhere `print(viewer)` says it in plain text. Needs the run's folder and nothing else of a run.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

from ..outputs import Output, in_notebook
from .episodes import EpisodeList, Place
from .html_page import episode_html
from .page import Decode, EpisodePage, find_decoder, gone_page, load_page, read_config
from .parts import verdict_words, visible
from .text import episode_text

SHOWN_NAMES = 20  # of a list in text


class EpisodeViewer:
    """Shows an attempt at the place where it is made, and another one there when it is asked to.

        viewer = EpisodeViewer("runs/first")   # the first attempt of the training, and a row to choose others from
        viewer.show("g000003-a2")              # as the row does
        viewer.refresh()                       # take in what a live run has recorded since

    Attempts are named as in `viewer.names`: g000003-a2 is attempt 2 of group 3, with the evaluation, the client or the
    part of the run before it where there are several of that name: what a live run records may make the name of what is
    shown longer, and it stays what is shown. A saved notebook holds one HTML output.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str | None = None,
        *,
        chooser: bool = True,
        tokenizer: Any = None,
    ) -> None:
        """Show the attempt of that name, or the first one.

        chooser: whether a notebook gets a row to choose from. tokenizer: what decodes the tokens; by default the
        run's own, where it is on this machine. Raises FileNotFoundError where there is no such folder, LookupError
        that names near ones for an unknown name.
        """
        self._lock = threading.RLock()  # a press may come while a cell runs
        self._episodes = EpisodeList(folder)
        self._config = read_config(self._episodes.folder)
        self._decode: Decode | None
        self._decode, self._why_not = find_decoder(self._config, tokenizer)
        self._page: EpisodePage | None = None
        self._place: Place | None = None  # of what is shown: its name may change while a run is live
        self._whole = False
        self._row: Any = None
        self._choice, self._output = Output(), Output()
        name = self._first() if name is None else self._episodes.find(name)
        self._notebook = in_notebook()
        if self._notebook and chooser:
            self._add_chooser(name)
        self._load(name)

    def _first(self) -> str | None:
        """Name the first attempt of the training, or what there is."""
        names = self.names
        return next(
            (name for name in names if self._episodes.place(name).training), names[0] if names else None
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The attempts that can be looked at, as of the last refresh: by time of their phase, client, group, attempt."""
        return self._episodes.names

    @property
    def name(self) -> str | None:
        """What is shown."""
        return self._page.name if self._page is not None else None

    @property
    def html(self) -> str:
        """What is shown, as HTML."""
        if self._page is None:
            return f"<p>{NOTHING}</p>"
        return episode_html(self._page, self._decode, self._why_not, self._whole)

    def __str__(self) -> str:
        """What is shown, as plain text."""
        return NOTHING if self._page is None else episode_text(self._page, self._decode, self._whole)

    def __repr__(self) -> str:
        """What is shown, in a few words."""
        if self._page is None:
            return "<EpisodeViewer: no episode has been recorded yet>"
        words = f"{self._page.name} {self._page.instance_id}, {verdict_words(self._page)}"
        return f"<EpisodeViewer: {visible(words)}; print() says all of it>"

    def _ipython_display_(self) -> None:
        """Show nothing where it is a cell's last value: it has shown itself already. In a terminal, its text."""
        if not self._notebook:
            print(self)

    def show(self, name: str | None = None, *, whole: bool = False) -> None:
        """Show another attempt in the same place, or the same one anew.

        whole: leave nothing out, however long it is. Raises LookupError that names near ones.
        """
        with self._lock:
            if name is None:
                self._load(self._shown(), whole)
            else:
                self._load(self._find(name), whole)
            self._follow()

    def refresh(self) -> None:
        """Take in what was recorded, graded or deleted since, and show the same attempt anew."""
        with self._lock:
            self._episodes.refresh()
            self._config = self._config or read_config(self._episodes.folder)
            self._load(self._shown() if self._place is not None else self._first(), self._whole)
            self._follow()

    def _find(self, name: str) -> str:
        """Return the name that is meant, also of what a live run has recorded meanwhile."""
        try:
            return self._episodes.find(name)
        except LookupError:
            self._episodes.refresh()
        try:
            return self._episodes.find(name)
        except LookupError:
            if self._page is not None and (shown := self._shown()) is not None:
                self._page = replace(self._page, name=shown)
            self._follow()
            raise

    def _shown(self) -> str | None:
        """Return what is shown by its name of now; None where nothing is, or it is gone."""
        return None if self._place is None else self._episodes.name_of(self._place)

    def _follow(self) -> None:
        if self._row is not None:
            self._row.follow(self._shown())

    def _load(self, name: str | None, whole: bool = False) -> None:
        """Read and show an attempt; None: what is shown is gone, or nothing is."""
        if name is not None:
            self._page = load_page(self._episodes, name, self._config)
            self._place = self._episodes.place(name)
        elif self._page is not None and self._place is not None:
            self._page = gone_page(self._page, self._place, self._episodes.folder)
        self._whole = whole
        if self._notebook:
            self._output.put({"text/html": self.html, "text/plain": str(self)}, {})

    def _add_chooser(self, name: str | None) -> None:
        """Without ipywidgets, or with one that doesn't fit the kernel, a list in text says what serves instead."""
        try:
            from .chooser import Chooser

            self._row = Chooser(self._episodes, name, self.show, self.refresh)
            self._choice.put_widget(self._row.widget)
        except Exception as error:
            self._row = None
            why = f"{type(error).__name__}: {error}"
            self._choice.put(
                {"text/plain": f"no chooser here ({why}); viewer.show(name) does the same\n{self._list()}"},
                {},
            )

    def _list(self) -> str:
        """Return the first names and how those attempts ended."""
        names = self.names
        ends = [self._episodes.ended(name) for name in names[:SHOWN_NAMES]]
        width = max(map(len, names[:SHOWN_NAMES]), default=0)
        rows = [
            f"{name:{width}}  {ended.outcome if ended else 'not graded':12}  {ended.instance_id if ended else ''}".rstrip()
            for name, ended in zip(names, ends, strict=False)
        ]
        if left := len(names) - len(rows):
            rows.append(f"and {left:,} more in viewer.names, to {names[-1]}")
        return "\n".join(rows) or NOTHING


NOTHING = "No episode has been recorded yet; viewer.refresh() looks again."
