"""A notebook in a real browser, looked at and handled as a person does: menus, buttons, what is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .lab import PATIENCE, Lab, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Playwright, Route

WIDTH, HEIGHT = 1100, 900  # pixels of the window
TALLEST = 16_000  # pixels of a picture of a whole notebook
LAB_ALONE = "http://127.0.0.1"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
OPEN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
# Scrolls to the top, and returns how many pixels of the cells lie below the window's lower edge then.
HIDDEN = """panel => {
    panel.scrollTop = 0;
    const bottom = [...panel.querySelectorAll(".jp-Cell")].at(-1).getBoundingClientRect().bottom;
    return Math.ceil(bottom - panel.getBoundingClientRect().bottom);
}"""
ERRORS = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")


class Observer:
    """Hears what pages complain of and what they ask of other machines, which it refuses."""

    def __init__(self, context: BrowserContext) -> None:
        self.complaints: list[str] = []
        self.outside: list[str] = []
        context.route(lambda url: not url.startswith((LAB_ALONE, "data:", "blob:")), self._refuse)
        context.on("console", self._console)
        context.on("weberror", lambda error: self.complaints.append(f"uncaught: {error.error}"))

    def _refuse(self, route: Route) -> None:
        self.outside.append(route.request.url)
        route.abort()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location.get('url')})")


class NotebookPage:
    """One notebook open in JupyterLab.

    Texts are read as they are in the page, not as they are rendered: what is scrolled away is not.
    """

    def __init__(self, context: BrowserContext, lab: Lab, name: str, code_cells: int) -> None:
        """Open it and wait until all of its cells are there and its kernel is."""
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}&reset")
        self.cells = self.page.locator(f"{OPEN} .jp-CodeCell")
        wait_until(lambda: self.cells.count() == code_cells, f"all cells of {name} are shown")
        self.page.locator("#jp-main-statusbar").get_by_text(
            "| Idle"
        ).wait_for()  # earlier its cells cannot run
        self.page.locator(
            ".jp-SideBar .lm-mod-current[data-id=filebrowser]"
        ).click()  # gives its room to the notebook

    def menu(self, *names: str) -> None:
        """Choose an item of the main menu by the names on the way to it."""
        first, *others = names
        self.page.locator("#jp-MainMenu .lm-MenuBar-item").filter(has_text=re.compile(f"^{first}$")).click()
        for name in others:
            label = self.page.locator(".lm-Menu-itemLabel").filter(has_text=re.compile(f"^{name}$"))
            label.last.click()

    def cell(self, code: str) -> Locator:
        """The only code cell with this text in its code."""
        return self.cells.filter(has=self.page.locator(".jp-InputArea-editor", has_text=code))

    def buttons(self, cell: Locator, name: str = "") -> Locator:
        """The buttons in a cell's outputs, or the one of that name."""
        return cell.locator(".jp-OutputArea button").filter(has_text=name)

    def waits(self, cell: Locator) -> bool:
        """Whether a cell runs, or waits for its turn."""
        return "*" in str(cell.locator(".jp-InputArea-prompt").text_content())

    def finished(self) -> bool:
        """Whether all code cells have run in order, or one has failed."""
        prompts = self.cells.locator(".jp-InputArea-prompt").all_text_contents()
        return prompts == [f"[{n}]:" for n in range(1, len(prompts) + 1)] or bool(self.errors())

    def errors(self) -> list[str]:
        """What cells show as errors or wrote to stderr."""
        selector = ", ".join(f"{OPEN} .jp-OutputArea-output[data-mime-type='{kind}']" for kind in ERRORS)
        return self.page.locator(selector).all_text_contents()

    def picture_source(self, cell: Locator) -> str | None:
        """The src of the only picture that a cell shows."""
        images = cell.locator(".jp-OutputArea img")
        return images.first.get_attribute("src") if images.count() else None

    def use_theme(self, kind: str) -> None:
        self.menu("Settings", "Theme", THEMES[kind])
        self.page.locator(f"body[data-jp-theme-name='{THEMES[kind]}']").wait_for(state="attached")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def save_pictures(self, folder: Path, name: str, cell: Locator | None = None) -> None:
        """Save the whole notebook, or one cell, as it looks in a light and in a dark theme."""
        self._make_room()
        for kind in ("dark", "light"):
            self.use_theme(kind)
            (self.page if cell is None else cell).screenshot(path=folder / f"{name}-{kind}.png")
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    def _make_room(self) -> None:
        """Make the window as high as the notebook, whose cells take their true heights only when they come into view."""
        panel, height = self.page.locator(f"{OPEN} .jp-WindowedPanel-outer"), HEIGHT
        around = panel.evaluate("panel => innerHeight - panel.clientHeight")
        while height < TALLEST and (hidden := int(panel.evaluate(HIDDEN))) > 0:
            height = min(TALLEST, height + hidden)
            self.page.set_viewport_size({"width": WIDTH, "height": height})
            room = height - around
            wait_until(
                lambda room=room: panel.evaluate("panel => panel.clientHeight") >= room, "there is room"
            )  # type: ignore[misc]


def launch(playwright: Playwright, program: str) -> Browser:
    """Start a browser that keeps to itself."""
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu", "extensions")
    return playwright.chromium.launch(
        executable_path=program,
        args=["--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in quiet)],
    )
