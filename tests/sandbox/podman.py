"""A real container engine for the tests: podman's service of Docker's API, with an image of this machine's programs.

Nothing is fetched: the image is a tar of the bash, git, coreutils and Python that are installed here, with the
libraries that they need and with pytest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from .registry import Registry

IMAGE = "localhost/swegym-test:1"
REQUIRED = "SWEGYM_TUTORIAL_REQUIRE"  # names what must not be skipped, with commas between
_PROGRAMS = (
    *("awk", "base64", "basename", "bash", "cat", "chmod", "chown", "cp", "cut", "date", "diff"),
    *("dirname", "env", "expr", "false", "find", "git", "grep", "head", "id", "kill", "ln"),
    *("ls", "mkdir", "mkfifo", "mktemp", "mv", "nohup", "od", "printf", "ps", "pwd", "readlink"),
    *("realpath", "rm", "rmdir", "sed", "seq", "setsid", "sh", "sha256sum", "sleep", "sort", "stat"),
    *("tail", "tar", "tee", "test", "timeout", "touch", "tr", "true", "uname", "uniq", "wc"),
    *("which", "whoami", "xargs", "yes"),
)
_SITE = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEFT_OUT = re.compile(  # of Python's library and of git's programs
    r"/(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data|config-[^/]*)$"
    r"|\.opt-\d\.pyc$|/(_test|_ctypes_test|xx)[^/]*\.so$"
    r"|/git-core/.*(http|imap|daemon|scalar|sh-i18n|svn|cvs|gui|p4|mergetool|send-email)"
)


@dataclass(frozen=True)
class Engine:
    """A running engine. settings: environment variables that lead the docker sandbox to it and to the image."""

    settings: dict[str, str]
    environment: dict[str, str]  # of podman's own command line
    registry: Registry
    address: str  # the registry's host:port

    def podman(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run podman's command line; return what it says."""
        done = subprocess.run(
            ["podman", *arguments],
            input=stdin,
            env=self.environment,
            capture_output=True,
            cwd=self.environment["HOME"],
        )
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
        return done.stdout.decode()

    def containers(self) -> set[str]:
        """The names of all containers, running or not."""
        return set(self.podman("ps", "--all", "--format", "{{.Names}}").split())


def skip_or_fail(kind: str, reason: str) -> None:
    """Skip a test that cannot run here, unless the environment says that it must."""
    if kind in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(f"{REQUIRED} asks for {kind}: {reason}")
    pytest.skip(reason=reason)


def why_not() -> str | None:
    """Return why these tests cannot have an engine here; None where they can."""
    if missing := [name for name in ("podman", "runc") if not shutil.which(name)]:
        return f"no container engine for the tests: {' and '.join(missing)} not installed"
    if importlib.util.find_spec("docker") is None:
        return "the package docker is not installed"
    return None if os.geteuid() == 0 else "no container engine for the tests: they start podman as root alone"


@contextlib.contextmanager
def start_engine(registry: Registry, address: str) -> Iterator[Engine]:
    """Start podman with all that it keeps in a temporary folder, give it the image; end and delete it all.

    address: the registry's host:port, which is spoken to without TLS.
    """
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    for driver in ("overlay", "vfs"):
        for name, text in _configuration(folder, driver, address).items():
            (folder / name).write_text(text)
            environment[name] = str(folder / name)
        if not subprocess.run(["podman", "info"], env=environment, capture_output=True).returncode:
            break
    socket = f"unix://{folder}/podman.sock"
    engine = Engine({"DOCKER_HOST": socket, "SWEGYM_TUTORIAL_IMAGE": IMAGE}, environment, registry, address)
    with open(folder / "log", "w") as log:
        service = subprocess.Popen(
            ["podman", "system", "service", "--time=0", socket],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=folder,  # its helpers leave files where they run
        )
    try:
        end = time.monotonic() + 120
        while not (folder / "podman.sock").exists():
            assert service.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.02)
        engine.podman("import", "-", IMAGE, stdin=root_file_system())
        yield engine
    finally:
        for command in ("unpause --all", "rm --all --force --time 0"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["podman", *command.split()], env=environment, capture_output=True, timeout=60)
        service.terminate()
        try:
            service.wait(30)
        except subprocess.TimeoutExpired:  # it waits for who is still connected
            service.kill()
            service.wait()
        _end_helpers(str(folder))
        _delete(folder)


def _end_helpers(folder: str, patience: float = 10.0) -> None:
    """Wait for the processes with which podman tidies up after its containers; kill those that stay."""
    end = time.monotonic() + patience
    while left := [
        p for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())
    ]:
        if time.monotonic() > end:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.05)


def _delete(folder: Path, patience: float = 30.0) -> None:
    """Delete podman's folder with what is mounted in it."""
    end = time.monotonic() + patience
    while folder.exists():
        mounted = re.findall(rf"^\S+ ({re.escape(str(folder))}\S*)", Path("/proc/mounts").read_text(), re.M)
        for mount in reversed(mounted):
            subprocess.run(["umount", mount], capture_output=True)
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _configuration(folder: Path, driver: str, address: str) -> dict[str, str]:
    return {
        "CONTAINERS_CONF": (
            "[containers]\ndefault_ulimits = []\n[engine]\n"
            'runtime = "runc"\ncgroup_manager = "cgroupfs"\n'  # crun needs cgroups of one version
            'events_logger = "none"\nexit_command_delay = 1\n'  # seconds; or a helper of each exec lives for minutes
            f'tmp_dir = "{folder}/tmp"\nimage_copy_tmp_dir = "{folder}"\n'
        ),
        "CONTAINERS_STORAGE_CONF": (
            f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        ),
        "CONTAINERS_REGISTRIES_CONF": f'[[registry]]\nlocation = "{address}"\ninsecure = true\n',
    }


def root_file_system() -> bytes:
    """Return a tar of what the image holds, without a file of this machine's users."""
    buffer, python = io.BytesIO(), f"{sys.base_prefix}/bin/{_PYTHON}"
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "lib", "lib64", "sbin"):
            if os.path.islink(f"/{name}"):
                _add(tar, f"/{name}", tarfile.SYMTYPE, link=os.readlink(f"/{name}"))
        for name, mode in {
            "/tmp": 0o1777,
            "/root": 0o700,
            "/proc": 0o555,
            "/sys": 0o555,
            "/dev": 0o755,
        }.items():
            _add(tar, name, tarfile.DIRTYPE, mode=mode)
        for inside, outside in sorted(_files().items()):
            tar.add(os.path.realpath(outside), inside[1:], filter=_kept)
        for name in ("python", "python3"):
            _add(tar, f"/usr/local/bin/{name}", tarfile.SYMTYPE, link=python)
        start = "#!/usr/local/bin/python\nimport sys, pytest\nsys.exit(pytest.console_main())\n"
        _add(tar, "/usr/local/bin/pytest", tarfile.REGTYPE, text=start, mode=0o755)
        _add(tar, "/etc/passwd", tarfile.REGTYPE, text="root:x:0:0:root:/root:/bin/bash\n")
        _add(tar, "/etc/group", tarfile.REGTYPE, text="root:x:0:\n")
    return buffer.getvalue()


_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"


def _add(
    tar: tarfile.TarFile, path: str, kind: bytes, *, link: str = "", text: str = "", mode: int = 0o644
) -> None:
    entry = tarfile.TarInfo(path[1:])
    entry.type, entry.linkname, entry.size, entry.mode = kind, link, len(text), mode
    tar.addfile(entry, io.BytesIO(text.encode()))


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT.search(f"/{entry.name}") else entry


def _files() -> dict[str, str]:
    """Path in the image -> file or folder of this machine."""
    files = {f"/usr/bin/{name}": path for name in _PROGRAMS if (path := shutil.which(name))}
    git = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True).stdout.strip()
    stdlib, site = Path(os.__file__).parent, Path(pytest.__file__).parent.parent
    library = f"{sys.base_prefix}/lib/{_PYTHON}"
    files[f"{sys.base_prefix}/bin/{_PYTHON}"] = sys.executable
    files |= {
        f"{library}/{path.name}": str(path) for path in stdlib.iterdir() if path.name != "site-packages"
    }
    for name in _SITE:
        files[f"{library}/site-packages/{name}"] = str(site / name)
    for path in (*site.glob("*.dist-info"), site / "py.py"):
        if path.name.split("-")[0].lower() in (*_SITE, "py.py"):
            files[f"{library}/site-packages/{path.name}"] = str(path)
    modules = map(str, stdlib.glob("lib-dynload/*.so"))
    for path in _libraries([*files.values(), *modules]):
        files[
            path
            if path.startswith("/usr/") or not os.path.islink(f"/{path.split('/')[1]}")
            else f"/usr{path}"
        ] = path
    locale = "/usr/lib/locale/C.utf8"
    return {**files, git: git, **({locale: locale} if os.path.isdir(locale) else {})}


def _libraries(programs: Iterable[str]) -> set[str]:
    """The shared libraries that programs need, and the loader."""
    told = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    return set(re.findall(r"(?:=> |^\s)(/\S+) \(0x", told, re.MULTILINE))
