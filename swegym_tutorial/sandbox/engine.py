"""Find the container engine of this machine.

It is the one that DOCKER_HOST names, else that of Docker's current context or the usual socket.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from . import SandboxUnavailable

CONNECT_TIMEOUT = 15  # seconds: podman on a machine with ten times its load was seen to take more than 5
API_TIMEOUT = 120  # seconds for one answer of the engine


def connect() -> Any:
    """Return a docker.APIClient of the engine. Raises SandboxUnavailable where none answers, within seconds."""
    try:
        import docker
        import docker.utils
    except ImportError as error:
        raise SandboxUnavailable(
            f'the docker sandbox needs the docker package ({error}): pip install "swegym_tutorial[docker]"'
        ) from error
    failures = []
    for settings in _engines():
        try:
            api = docker.APIClient(version="auto", timeout=CONNECT_TIMEOUT, max_pool_size=256, **settings)
        except (docker.errors.DockerException, OSError, ValueError) as error:
            failures.append(f"{settings.get('base_url', 'the usual socket')}: {error}")
        else:
            api.timeout = API_TIMEOUT
            return api
    raise SandboxUnavailable(
        f"no container engine answers ({'; '.join(failures)}): start Docker Desktop or `systemctl start docker`, or "
        "for podman `systemctl --user start podman.socket` and "
        "`export DOCKER_HOST=unix://$XDG_RUNTIME_DIR/podman/podman.sock`; or use --sandbox local or modal"
    )


def _engines() -> list[dict[str, Any]]:
    """Ways to an engine, the best first."""
    import docker.utils
    from docker.context import ContextAPI

    if os.environ.get("DOCKER_HOST"):
        return [docker.utils.kwargs_from_env()]
    urls: list[str] = []
    with contextlib.suppress(Exception):  # a broken configuration of Docker's command line
        urls.append(ContextAPI.get_current_context().Host)
    places = [
        Path("/var/run/docker.sock"),
        Path.home() / ".docker/run/docker.sock",
        Path("/run/podman/podman.sock"),
    ]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.insert(2, Path(runtime, "podman/podman.sock"))
    urls += [f"unix://{place}" for place in places if place.exists()]
    return [{"base_url": url} for url in dict.fromkeys(filter(None, urls))] or [{}]
