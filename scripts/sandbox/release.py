"""Slurm of another Debian release, in a cache folder.

The release's packages are unpacked, not installed, and their programs are told by patchelf to start with the loader
and the libraries of their own release. So there is no chroot, no mount and no need of root; and a job, which Slurm
starts as a plain process of this machine, finds this machine's shell, Python and files as it does on a cluster.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox.errors import USER_INPUT, SandboxError
from sandbox.packages import HOST_PATH, PACKAGES, Programs, apt_get, install_missing

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR = "http://deb.debian.org/debian"
FORMAT = 1  # of the cache; a folder of another format is made anew
NEEDED = {"apt-get": "apt", "dpkg-deb": "dpkg", "tar": "tar"}
LEFT_OUT = ("./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*", "./etc/*", "./var/*")


def own_release() -> str:
    """Return the code name of the Debian that this machine runs; empty when it is another system."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    is_debian = values.get("ID", "").strip('"') == "debian"
    return values.get("VERSION_CODENAME", "").strip('"') if is_debian else ""


def default_cache() -> Path:
    """Folder that keeps what was downloaded: readable to all users when root makes it."""
    if value := os.environ.get("XDG_CACHE_HOME", ""):
        return Path(value) / "hpjob"
    return Path("/var/cache/hpjob") if os.geteuid() == 0 else Path.home() / ".cache" / "hpjob"


def programs_of(release: str, cache: Path) -> Programs:
    """Return the programs of a release, downloaded or installed when missing.

    Args:
        release: Code name such as ``trixie``; empty = this machine's own Slurm.
        cache: Folder for what is unpacked.

    Raises:
        SandboxError: No such release, or something is missing: root, network, a tool.
    """
    if release in ("", own_release()):
        install_missing()
        return Programs()
    root = cache / f"slurm-{release}"
    if not re.fullmatch(r"[A-Za-z0-9_./+@-]+", str(root)):
        raise SandboxError(
            f"the cache folder's path {str(root)!r} has characters that slurm.conf cannot hold",
            hint="use --root-cache with letters, digits and ./_+@- only",
            exit_code=USER_INPUT,
        )
    if not _is_complete(root):
        with _locked(cache):
            if not _is_complete(root):
                _make(root, release)
    return Programs(root / "bin", _plugins(root))


def _is_complete(root: Path) -> bool:
    """Whether the folder is whole: it gets its name last, and says where it was made for."""
    try:
        made: object = json.loads((root / "made.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return made == _made(root)


def _made(root: Path) -> dict[str, object]:
    return {"format": FORMAT, "packages": list(PACKAGES), "path": str(root)}


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cache / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SandboxError(
            f"cannot write the cache folder {cache}: {error.strerror}", hint="name another with --root-cache"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(root: Path, release: str) -> None:
    missing = [tool for tool in NEEDED if shutil.which(tool, path=HOST_PATH) is None]
    if missing or not KEYRING.is_file():
        wanted = [NEEDED[tool] for tool in missing] + ([] if KEYRING.is_file() else ["debian-archive-keyring"])
        raise SandboxError(
            f"Slurm of Debian {release} is not installed; unpacking it needs {', '.join(missing or [str(KEYRING)])}",
            hint=f"install {' '.join(wanted)}, or leave out --release to run this machine's own Slurm",
        )
    print(f"fetching Slurm of Debian {release} into {root} …", file=sys.stderr)
    new = root.with_name(f"{root.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        packages = _download(new / "apt", release)
        _unpack(packages, new)
        _bind_programs(packages, new, root)
        shutil.rmtree(new / "apt")
        (new / "made.json").write_text(json.dumps(_made(root)), encoding="utf-8")
        shutil.rmtree(root, ignore_errors=True)
        new.rename(root)
        _command([str(root / "bin" / "slurmd"), "-V"])
    except OSError as error:
        raise SandboxError(f"{root} could not be made: {error}", hint="name another with --root-cache") from error
    except SandboxError:
        shutil.rmtree(root, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _download(apt: Path, release: str) -> list[Path]:
    """Let apt find and check the packages with all that they need, in folders of its own."""
    for name in ("lists/partial", "archives/partial", "etc"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    settings = {
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Etc::sourcelist": apt / "etc" / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferences": "-",
        "Dir::Etc::preferencesparts": "-",
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Acquire::Retries": 3,
        "Acquire::http::Timeout": 30,
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    hint = "is the network there, and is that a release of Debian? without --release this machine's own Slurm is used"
    mirrors = _mirrors()
    for mirror in mirrors:
        source = f"deb [signed-by={KEYRING}] {mirror} {release} main\n"
        (apt / "etc" / "sources.list").write_text(source, encoding="utf-8")
        try:
            apt_get([*options, "update"], hint=hint)
            break
        except SandboxError as error:
            if mirror == mirrors[-1]:
                error.message = f"Slurm of Debian {release} is not installed and cannot be fetched\n{error.message}"
                raise
    wanted = ["install", "--yes", "--no-install-recommends", "--download-only", *PACKAGES, "patchelf"]
    apt_get([*options, *wanted], hint=hint)
    return sorted((apt / "archives").glob("*.deb"))


def _mirrors() -> list[str]:
    """The mirror that this machine's apt uses, and Debian's own."""
    form = "$(LABEL)|$(CODENAME)|$(REPO_URI)"
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line.split("|") for line in done.stdout.splitlines()]
    found = [line[2].rstrip("/") for line in lines if len(line) == 3 and line[0] == "Debian" and "-" not in line[1]]
    return list(dict.fromkeys([*found, MIRROR]))


def _unpack(packages: list[Path], root: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
    for name in ("sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    leave_out = [f"--exclude={pattern}" for pattern in LEFT_OUT]
    for package in packages:
        tar = ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--no-same-permissions", *leave_out]
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as reading:
            done = subprocess.run(
                [*tar, "--directory", root], stdin=reading.stdout, stderr=subprocess.PIPE, text=True, check=False
            )
        if done.returncode or reading.returncode:
            raise SandboxError(
                f"{package.name} could not be unpacked: {done.stderr.strip()[-500:]}", hint="is the disk full?"
            )


def _bind_programs(packages: list[Path], new: Path, root: Path) -> None:
    """Tell the programs that they start with the loader and libraries in ``root``, and link them in ``bin``."""
    loader = next(iter(sorted((new / "usr").glob("lib*/ld-linux*.so.*"))), None)
    if loader is None:
        raise SandboxError("the release's packages have no loader", hint="this kind of machine is not known here")
    plugins = _plugins(new)
    libraries = [plugins, plugins.parent]
    patchelf = [str(loader), "--library-path", str(plugins.parent), str(new / "usr" / "bin" / "patchelf")]
    final = [str(root / library.relative_to(new)) for library in libraries]
    settings = [
        "--set-interpreter", str(root / loader.relative_to(new)), "--force-rpath", "--set-rpath", ":".join(final),
    ]  # fmt: skip
    links = new / "bin"
    links.mkdir()
    for program in _programs(packages, new):
        _command([*patchelf, *settings, str(program)])
        (links / program.name.removesuffix("-wlm")).symlink_to(f"../{program.relative_to(new)}")


def _programs(packages: list[Path], root: Path) -> list[Path]:
    """The compiled programs of Slurm's and munge's own packages."""
    found = []
    for package in packages:
        if package.name.partition("_")[0] not in PACKAGES:
            continue
        for line in _command(["dpkg-deb", "--contents", str(package)]).splitlines():
            match = re.search(r" \./(usr/s?bin/[^/ ]+)$", line)
            if match and line.startswith("-") and (root / match[1]).read_bytes()[:4] == b"\x7fELF":
                found.append(root / match[1])
    return found


def _plugins(root: Path) -> Path:
    found = next(iter(sorted((root / "usr" / "lib").glob("*/slurm*/auth_munge.so"))), None)
    if found is None:
        raise SandboxError("the release's packages have no plugins of Slurm", hint="choose another --release")
    return found.parent


def _command(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(
            f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}",
            hint="delete the cache folder and try again, or leave out --release",
        )
    return done.stdout
