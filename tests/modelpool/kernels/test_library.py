"""The library is compiled once, into a folder of its own, and not trusted blindly."""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool.kernels import compiler, library
from modelpool.kernels.library import (
    c_library,
    kernels_of,
    library_file,
    linear_kernels,
    opened,
)
from test_support.cache_damage import OF_FILE

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler"
)


@pytest.fixture(scope="module")
def compiled() -> Path | None:
    """The folder that the first call of all tests has left in a cache that was empty."""
    return library_file().parent if shutil.which("cc") or shutil.which("gcc") else None


@pytest.fixture(autouse=True)
def cache(compiled: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Which has the library already."""
    if compiled is not None:
        (tmp_path / "kernels").mkdir(mode=0o700)
        shutil.copytree(compiled, tmp_path / "kernels" / compiled.name)
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))
    monkeypatch.delenv("SPECROUTER_KERNEL", raising=False)
    c_library.cache_clear()
    linear_kernels.cache_clear()
    yield tmp_path
    c_library.cache_clear()
    linear_kernels.cache_clear()


@needs_compiler
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compile_library", lambda *_: pytest.fail("compiled again"))
    file = library_file()
    folder = file.parent
    assert list((cache / "kernels").iterdir()) == [folder]
    assert {one.stat().st_mode & 0o777 for one in (file, folder, folder.parent)} == {0o700}
    assert kernels_of(opened(file)) is not None


@needs_compiler
def test_other_flags_and_options_of_the_compiler_have_another_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def touched(_: object, folder: Path) -> None:
        (folder / compiler.NAME).touch(0o700)

    monkeypatch.setattr(library, "compile_library", touched)
    files = {library_file()}
    monkeypatch.setattr(compiler, "FLAGS", ("-O1", *compiler.FLAGS[1:]))
    files.add(library_file())
    for command in ("env cc", "env cc -DOTHER"):
        monkeypatch.setenv("CC", command)
        files.add(library_file())
    assert len(files) == 4


@pytest.fixture
def compilations(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each. To compile is to copy what was compiled, and takes a while."""
    done = tmp_path / "compilations"

    def copy(_: object, folder: Path) -> None:
        with done.open("a") as file:
            file.write("compiled\n")
        time.sleep(0.1)
        shutil.copy2(compiled / compiler.NAME, folder)

    monkeypatch.setattr(library, "compile_library", copy)
    return done


@needs_compiler
def test_several_processes_begin_at_once_and_one_compiles(cache: Path, compilations: Path) -> None:
    shutil.rmtree(cache / "kernels")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=library_file) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert compilations.read_text() == "compiled\n"
    assert len(list((cache / "kernels").iterdir())) == 1
    assert kernels_of(opened(library_file())) is not None


@needs_compiler
@pytest.mark.parametrize("place", ["cache", "folder", "file"])
def test_what_others_can_write_is_not_loaded(place: str, caplog: pytest.LogCaptureFixture) -> None:
    file = library_file()
    {"file": file, "folder": file.parent, "cache": file.parent.parent}[place].chmod(0o777)
    assert linear_kernels() is None
    assert "can be written by others" in caplog.text


def test_without_a_compiler_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert linear_kernels() is None
    assert [one.getMessage() for one in caplog.records] == [
        "no C library: attention is slow, and texts may differ between batches: "
        "there is no C compiler"
    ]


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "nowhere cc", "false", "false -m64", 'cc "'])
def test_a_compiler_that_fails_is_one_line(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert linear_kernels() is None
    assert len(caplog.records) == 1
    assert compiler.split()[0] in caplog.text


@needs_compiler
@pytest.mark.usefixtures("compilations")
@pytest.mark.parametrize("name", ["cut to half", "gone"])
def test_a_damaged_file_is_compiled_anew(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """To map one that is cut would end the process."""
    file = library_file()
    whole = file.read_bytes()
    OF_FILE[name](file)
    assert linear_kernels() is not None
    assert (len(caplog.records), library_file().read_bytes()) == (1, whole)


@needs_compiler
def test_the_switch_names_a_kernel_or_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = kernels_of(opened(library_file()))
    assert own is not None
    for name in own.available:
        monkeypatch.setenv("SPECROUTER_KERNEL", name)
        c_library.cache_clear()
        linear_kernels.cache_clear()
        found = linear_kernels()
        assert found is not None
        assert found.name == name
    monkeypatch.setenv("SPECROUTER_KERNEL", "off")
    c_library.cache_clear()
    linear_kernels.cache_clear()
    assert linear_kernels() is None
    monkeypatch.setenv("SPECROUTER_KERNEL", "mmx")
    c_library.cache_clear()
    linear_kernels.cache_clear()
    found = linear_kernels()
    assert found is not None
    assert found.name == own.name
    assert "SPECROUTER_KERNEL=mmx" in caplog.text
