"""Container images of an engine that speaks Docker's API: there, pulled, built, or why not.

Knows registries' and engines' answers; nothing of containers or tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import SandboxError

DOCKERFILE = Path(__file__).with_name("laptop.Dockerfile")
PULLS = 4  # tries to pull an image
PULLS_AT_ONCE = 4  # images
QUESTIONS = 2  # tries to ask a registry, before the last
FIRST_PAUSE = 2.0  # seconds before the second try, doubled each time; give or take half
SAY_EVERY = 3.0  # seconds between two words about one image
# Engines tell most failures by words alone. These will not go away by trying again.
_FINAL = re.compile(
    "not found|manifest unknown|name unknown|(?<!permission )denied|unauthorized|no such image|does not exist"
    "|no matching manifest|no image found in manifest list|invalid reference"
)


@contextlib.contextmanager
def talking(what: str) -> Iterator[None]:
    """Turn whatever an engine or the way to it raises into SandboxError with `what` and the engine's words."""
    import docker.errors
    import requests
    import urllib3

    try:
        yield
    except docker.errors.APIError as error:
        raise SandboxError(f"{what}: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise SandboxError(f"{what}: the container engine does not answer: {error}") from error
    except OSError as error:
        raise SandboxError(f"{what}: the container engine does not answer: {error}") from error


class Images:
    """The images of one engine. Safe for many threads; that one image is fetched once is the caller's care."""

    def __init__(self, api: Any, say: Callable[[str], None]) -> None:
        """api: a docker.APIClient. say: told about pulls and builds, every few seconds at most."""
        self._api, self._say = api, say
        self._pulls = threading.Semaphore(PULLS_AT_ONCE)
        self._closed = threading.Event()
        components = api.version().get("Components") or ()
        self._podman = any(part.get("Name") == "Podman Engine" for part in components)

    def close(self) -> None:
        """End the pulls and builds: each at the engine's next word about it."""
        self._closed.set()

    def find(self, name: str) -> str | None:
        """Return the id of an image that is there; None where it is not."""
        import docker.errors

        with talking(f"the image {name} could not be looked for"):
            try:
                return str(self._api.inspect_image(name)["Id"])
            except docker.errors.ImageNotFound:
                return None

    def get(self, name: str) -> str:
        """Return the id of an image, pulled where it is not there. Raises SandboxError where it cannot be had."""
        if found := self.find(name):
            return found
        for number in range(PULLS):
            with self._pulls:
                failure = self._pull(name)
            if failure is None:
                break
            if number == PULLS - 1 or is_final(failure) or self._closed.is_set():
                raise SandboxError(f"the image {name} could not be pulled: {failure}")
            self._say(f"pulling {name} failed ({failure}); trying again")
            self._closed.wait(FIRST_PAUSE * 2**number * random.uniform(0.5, 1.5))
        if found := self.find(name):
            return found
        raise SandboxError(f"the image {name} was pulled and is not there: is the disk full?")

    def why_missing(self, name: str) -> str | None:
        """Return why an image is neither there nor at its registry; None where it can be had.

        Asks the registry for the manifest alone. Raises SandboxError where it does not answer, or is too busy.
        """
        if self.find(name):
            return None
        for number in range(QUESTIONS):
            with contextlib.suppress(SandboxError):
                return self._ask(name)
            time.sleep(FIRST_PAUSE * 2**number * random.uniform(0.5, 1.5))
        return self._ask(name)

    def _ask(self, name: str) -> str | None:
        import docker.errors
        import requests

        with talking(f"the registry of {name} could not be asked"):
            try:
                if self._podman:  # has Docker's call, and answers "Not Found" to whatever name
                    url = f"{self._api.base_url}/v4.0.0/libpod/manifests/{name}/json"
                    self._api.get(url).raise_for_status()
                else:
                    self._api.inspect_distribution(name)
            except docker.errors.APIError as error:
                if error.status_code not in (401, 403, 404) and not is_final(str(error)):
                    raise
                return f"no image {name}: {error.explanation}"
            except requests.HTTPError as error:
                words = "" if error.response is None else str(error.response.json().get("message"))
                if not is_final(words):
                    raise SandboxError(f"the registry of {name} could not be asked: {words}") from error
                return f"no image {name}: {words}"
        return None

    def build(self, dockerfile: str, name: str) -> str:
        """Return the id of the image that a Dockerfile makes, built where it is not there. Raises SandboxError."""
        if found := self.find(name):
            return found
        self._say(f"building {name}, once")
        with talking(f"the image {name} could not be built"):
            steps = self._api.build(
                fileobj=io.BytesIO(dockerfile.encode()), tag=name, rm=True, forcerm=True, decode=True
            )
            failure, last = None, ""
            for text in self._told(steps, lambda event: str(event.get("stream") or "").strip()):
                failure, last = (text[1], last) if text[0] else (failure, text[1])
                if not text[0]:
                    self._say(f"building {name}: {last}")
        if failure is None and (found := self.find(name)):
            return found
        raise SandboxError(f"the image {name} could not be built: {failure or last}")

    def _pull(self, name: str) -> str | None:
        """Pull an image; return what went wrong, or None."""
        progress = Progress()
        self._say(f"pulling {name}")
        try:
            with talking("the pull failed"):
                for failed, text in self._told(self._api.pull(name, stream=True, decode=True), progress.add):
                    if failed:
                        return text
                    self._say(f"pulling {name}{': ' if text else ''}{text}")
        except SandboxError as error:
            return str(error)
        return None

    def _told(
        self, events: Iterable[dict[str, Any]], words: Callable[[dict[str, Any]], str]
    ) -> Iterator[tuple[bool, str]]:
        """Yield (False, what to say) every few seconds, and (True, the failure) where the engine tells one."""
        due = time.monotonic() + SAY_EVERY
        for event in events:
            if self._closed.is_set():
                yield True, "it was closed meanwhile"
                return
            if failure := event.get("error") or (event.get("errorDetail") or {}).get("message"):
                yield True, str(failure).strip()
                return
            text = words(event)
            if text and time.monotonic() >= due:
                due = time.monotonic() + SAY_EVERY
                yield False, text


class Progress:
    """Adds up the layers of a pull."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}  # bytes that came, bytes in all

    def add(self, event: dict[str, Any]) -> str:
        """Take one event of the engine's; return the state in words: "3 of 12 MB", "" where there are no sizes."""
        layer, detail = event.get("id"), event.get("progressDetail") or {}
        if layer and event.get("status") == "Downloading" and detail.get("total"):
            self._layers[layer] = (int(detail.get("current") or 0), int(detail["total"]))
        elif layer in self._layers and event.get("status") in ("Download complete", "Pull complete"):
            self._layers[layer] = (self._layers[layer][1],) * 2
        came, size = (
            (sum(numbers) for numbers in zip(*self._layers.values(), strict=True)) if self._layers else (0, 0)
        )
        return f"{came / 1e6:.0f} of {size / 1e6:.0f} MB" if size else str(event.get("status") or "")


def is_final(failure: str) -> bool:
    """Whether a failure to get an image is the image's: it does not exist, or not for us."""
    return _FINAL.search(failure.lower()) is not None


def laptop_image() -> tuple[str, str]:
    """Return the Dockerfile of the image for tasks that bring files, and its name, which changes with it."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    return text, f"swegym-tutorial:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
