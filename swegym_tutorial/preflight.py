"""Whether a training server can do all that a run asks of it, tried before the first sandbox is opened.

Tinker-compatible servers differ: some know no prompt log-probabilities, some no `ppo` loss. Each lack is told in
one line with its mend, instead of hours later. Everything is tried on the first job's own adapter, with zero
advantages, so that no further adapter is taken and neither its weights nor its next gradient change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np

from .calls import PolicyError
from .config import TrainingConfig
from .policy import PolicyClient, PolicyService
from .sampler import PolicySampler

CONNECT_TIMEOUT = 10.0  # seconds until a server that does not take connections is given up
COLD_START = 900.0  # seconds that a server which took the connection may need to answer: it may have to start
TRIAL_TOKENS = 4


class PreflightError(PolicyError):
    """The training server lacks something that the run needs; the text names it and the mend."""


@contextlib.contextmanager
def _needs(what: str, mend: str) -> Iterator[None]:
    """Say what the server cannot do, and what to do about it."""
    try:
        yield
    except PolicyError as error:
        raise PreflightError(f"the training server cannot {what}. {mend}. It said: {error}") from error


def check_address(url: str, key: str, base_model: str) -> None:
    """Check that a Tinker-compatible server answers at the URL, takes the key and offers the model. Blocks.

    Waits for a server that starts up, but not for one that takes no connection. Raises PreflightError.
    """
    import httpx

    _check_form(url, key)
    timeout = httpx.Timeout(COLD_START, connect=CONNECT_TIMEOUT)
    address = f"{url.rstrip('/')}/api/v1/get_server_capabilities"
    try:
        answer = httpx.get(address, headers={"X-API-Key": key}, timeout=timeout, follow_redirects=True)
    except httpx.ConnectError as error:
        raise PreflightError(
            f"no server answers at {url}: {error}. Check TINKER_BASE_URL (`spindle deploy` prints it), and that "
            "the server is deployed"
        ) from error
    except httpx.HTTPError as error:
        told = f"{type(error).__name__}: {error}"
        raise PreflightError(f"the server at {url} does not answer: {told}. Is it still starting?") from error
    _check_answer(answer.status_code, answer.text, url)
    if answer.status_code != 200:  # a server without this call: what it cannot do shows later
        return
    try:
        offered = [model["model_name"] for model in answer.json()["supported_models"]]
    except (ValueError, KeyError, TypeError):
        raise PreflightError(
            f"{url} is no Tinker-compatible server: it answered {answer.text[:100]!r}"
        ) from None
    if offered and base_model not in offered:
        raise PreflightError(
            f"the server at {url} does not offer {base_model!r}; it offers {', '.join(map(repr, offered))}: "
            "name one with --base-model"
        )


def _check_form(url: str, key: str) -> None:
    """Refuse what is no address, and what cannot be a key; a key is never told."""
    import httpx

    try:
        parts, usable = urlsplit(url), bool(httpx.URL(url).host)
    except (httpx.InvalidURL, ValueError):
        usable = False
    if not usable or parts.scheme not in ("http", "https") or parts.query or parts.fragment or " " in url:
        raise PreflightError(f"TINKER_BASE_URL must look like https://host, not {url!r}")
    if parts.path.rstrip("/").endswith("/api/v1"):
        raise PreflightError(
            f"TINKER_BASE_URL is the address without /api/v1, which is added to it: not {url!r}"
        )
    if not key or not all("!" <= character <= "~" for character in key):
        raise PreflightError(
            "TINKER_API_KEY is no key: it is empty, or has a space, a line end or a character beyond ASCII in it"
        )


def _check_answer(status: int, text: str, url: str) -> None:
    said = f"it answered {status}: {' '.join(text.split())[:200]}"
    if status in (401, 403):
        raise PreflightError(f"the server at {url} refuses the key in TINKER_API_KEY; {said}")
    if status >= 500 or status in (408, 429):
        raise PreflightError(f"the server at {url} fails; {said}. Look at its logs, or try again later")
    if status not in (200, 404, 405):
        raise PreflightError(f"{url} is no Tinker-compatible server: {said}")


def check_training(
    service: PolicyService, client: PolicyClient, config: TrainingConfig, prompt: list[int], name: str
) -> None:
    """Publish, sample, ask for reference log-probabilities and run the loss once, without any effect.

    prompt: a few tokens. name: the name under which the untrained adapter is published.
    Raises PreflightError, Stopped.
    """
    with _needs("publish sampling weights", "The run publishes after each batch; use a server that can"):
        sampler = service.sampler(client.publish_once(name))
    with _needs("sample with log-probabilities", "The loss needs them; use a server that sends them"):
        sample = sampler.sample(prompt, TRIAL_TOKENS, seed=None)
    tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
    if config.kl_coef:
        mend = "Set kl_coef to 0 (--set kl_coef=0), which asks for none, or use a server that can"
        with _needs("give prompt log-probabilities of the base model", mend):
            reference = service.base_sampler()
            _check_reference(reference, tokens)
    logprobs = np.array([0.0] * len(prompt) + sample.logprobs, dtype=np.float32)
    with _needs("train with the `ppo` loss", "The recipe needs it; use a server that has it"):
        client.rehearse(tokens, logprobs)


def _check_reference(reference: PolicySampler, tokens: np.ndarray) -> None:
    values = reference.logprobs(tokens).result()
    if values.shape != tokens.shape:
        raise PolicyError(f"{len(values)} log-probabilities came for {len(tokens)} tokens")


def smoke_test(service: PolicyService, client: PolicyClient, prompt: list[int]) -> int:
    """Publish the fresh adapter and sample from it at temperature 0; returns the number of tokens."""
    sampler = service.sampler(client.publish_once(f"smoke-{time.time_ns()}"), temperature=0.0)
    return len(sampler.sample(prompt, TRIAL_TOKENS, seed=None).tokens)
