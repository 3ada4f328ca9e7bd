"""Outputs of a notebook's cell that are changed in place. Knows nothing of what is shown in them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # where it was not imported, this is no kernel
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Output:
    """One output of a cell, shown at the first `put` and changed in place by the next ones, from any thread."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._data: Mapping[str, str] = {}

    def put(self, data: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        """Show MIME data; does nothing where it is what is shown already."""
        from IPython.display import display

        if data == self._data:
            return
        self._data = data
        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)

    def put_widget(self, widget: Any) -> None:
        from IPython.display import display

        self._handle = display(widget, display_id=True)

    def remove(self) -> None:
        """Leave an empty output: the cell's others keep their places."""
        if self._handle is not None:
            self.put({"text/plain": ""}, {})
