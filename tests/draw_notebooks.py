"""Run the notebooks from top to bottom and keep their outputs, as they are committed: `draw_notebooks.py [NAME ...]`.

NAME is a notebook without its ending, or the beginning of one: `03`. Each is made anew from its twin NAME.py and
executed in a kernel of its own. What only a living kernel can use is dropped from the file: widgets and their state.
"""

from __future__ import annotations

import base64
import io
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent.parent / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"


def draw(path: Path) -> None:
    """Execute one twin and write the notebook beside it. Raises CellExecutionError where a cell fails."""
    book = jupytext.read(path)
    client = NotebookClient(
        book,
        timeout=600,
        resources={"metadata": {"path": str(FOLDER)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"  # the same each time, for a small diff
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if kept(output)]
            for output in cell.outputs:
                shrink(output.get("data", {}))
    book.metadata.pop("widgets", None)
    jupytext.write(book, path.with_suffix(".ipynb"))


def kept(output: Any) -> bool:
    """Whether an output says something in a saved file: not a widget, and not the place that one has left."""
    data = output.get("data", {})
    return WIDGET not in data and data != {"text/plain": ""}


def shrink(data: dict[str, Any]) -> None:
    """Give a picture a palette: figures have few colours, and a third of the bytes hold them as well."""
    if png := data.get("image/png"):
        small = io.BytesIO()
        picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
        picture.quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        data["image/png"] = base64.b64encode(small.getvalue()).decode()


def main() -> None:
    starts = tuple(sys.argv[1:]) or ("",)
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        if path.stem.startswith(starts):
            began = time.monotonic()
            draw(path)
            size = path.with_suffix(".ipynb").stat().st_size
            print(f"{path.stem:20} {time.monotonic() - began:6.1f} s  {size / 1000:6.1f} KB", flush=True)
            nbformat.validate(nbformat.read(path.with_suffix(".ipynb"), as_version=4))


if __name__ == "__main__":
    main()
