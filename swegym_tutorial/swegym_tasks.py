"""Where the SWE-Gym tasks come from: the file, the 31 of the published run, the images they run in.

The file is the 293-task training set of the ProRL-Agent-Server recipe (the tasks are SkyRL's selection from
SWE-Gym), at a fixed commit. Knows nothing of the Task record.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from .download import Check, cache_folder, cached

COMMIT = "6a1ead6bfac054fce6c1e62d1a77b330d96c58db"
URL = (
    f"https://raw.githubusercontent.com/NVIDIA-NeMo/ProRL-Agent-Server/{COMMIT}"
    "/examples/swegym_slime_grpo/swegym_train_293.jsonl"
)
ROWS = 293
ACTIVATE = "source /opt/miniconda3/bin/activate testbed"  # in SWE-Gym's images
TRAINING_IDS = (
    "python__mypy-16781",
    "iterative__dvc-6600",
    "Project-MONAI__MONAI-440",
    "getmoto__moto-7023",
    "python__mypy-10683",
    "getmoto__moto-7365",
    "iterative__dvc-6683",
    "python__mypy-11134",
    "getmoto__moto-6226",
    "Project-MONAI__MONAI-2696",
    "pandas-dev__pandas-57488",
    "pandas-dev__pandas-52194",
    "Project-MONAI__MONAI-3715",
    "Project-MONAI__MONAI-3384",
    "facebookresearch__hydra-1560",
    "Project-MONAI__MONAI-3690",
    "Project-MONAI__MONAI-4344",
    "getmoto__moto-5865",
    "getmoto__moto-6352",
    "Project-MONAI__MONAI-6560",
    "dask__dask-7894",
    "pandas-dev__pandas-49118",
    "Project-MONAI__MONAI-6924",
    "dask__dask-9212",
    "pandas-dev__pandas-53709",
    "Project-MONAI__MONAI-6446",
    "pandas-dev__pandas-52516",
    "getmoto__moto-6913",
    "pandas-dev__pandas-50331",
    "dask__dask-9235",
    "Project-MONAI__MONAI-4662",
)  # the published run's, in its order

_IMAGE_NAME = re.compile(
    r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
)  # what a registry takes as one part of a name


def image_of(instance_id: str) -> str:
    """Return the container image of a SWE-Gym task: SWE-Gym publishes one a task.

    Raises ValueError for an id that makes no valid image name.
    """
    name = f"sweb.eval.x86_64.{instance_id.lower().replace('__', '_s_')}"
    if not _IMAGE_NAME.fullmatch(name):
        raise ValueError(f"{instance_id!r} makes no image name: {name!r} is none that a registry takes")
    return f"xingyaoww/{name}:latest"


def address() -> str:
    """Return where the file comes from: the pinned one, or what SWEGYM_TUTORIAL_TASKS_URL names."""
    return os.environ.get("SWEGYM_TUTORIAL_TASKS_URL", "").strip() or URL


def cached_path() -> Path:
    """Return where the file is kept, whether or not it is there. Another address has another place."""
    url = address()
    key = COMMIT if url == URL else hashlib.sha256(url.encode()).hexdigest()
    return cache_folder() / f"swegym_train_{ROWS}-{key[:12]}.jsonl"


def swegym_file(check: Check) -> bytes:
    """Return the file's bytes, downloaded where they are not cached; see download.cached. Raises DownloadError."""
    return cached("the SWE-Gym tasks", address(), cached_path(), check)
