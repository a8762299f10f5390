"""The CUDA toolkit is found where it may be, and one that cannot compile is refused by name."""

import pytest

from onpolicy.ops import machine
from onpolicy.ops.machine import CudaToolkit, find_cuda_toolkit

RELEASE = "Cuda compilation tools, release {}, V{}.88"


@pytest.fixture(autouse=True)
def no_toolkit(monkeypatch, tmp_path):
    """A PATH with g++ and nothing else."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "USUAL", tmp_path / "nowhere")
    machine._say_replaced.cache_clear()
    executable(tmp_path / "path" / "g++")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin")


def executable(file, says=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)


def toolkit(home, release="13.0"):
    executable(home / "bin" / "nvcc", RELEASE.format(release, release))
    return home


def test_nvcc_is_found_where_the_gpu_extra_puts_it(monkeypatch, tmp_path):
    home = toolkit(tmp_path / "packages" / "nvidia" / "cu13")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert find_cuda_toolkit() == CudaToolkit(str(home))


def test_the_extras_libraries_without_a_compiler_are_passed_over(monkeypatch, tmp_path):
    """What torch itself brings is in the same folder."""
    libraries = tmp_path / "packages" / "nvidia" / "cu13"
    (libraries / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert f"{libraries} has no executable bin/nvcc" in find_cuda_toolkit().problem
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{tmp_path / 'path'}:/bin")
    assert find_cuda_toolkit() == CudaToolkit(str(home))


def test_what_cuda_home_names_is_taken_or_refused_and_never_replaced(monkeypatch, tmp_path):
    home = toolkit(tmp_path / "cuda")
    runtime_only = tmp_path / "runtime"
    (runtime_only / "lib64").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{tmp_path / 'path'}:/bin")
    monkeypatch.setenv("CUDA_PATH", str(home))
    assert find_cuda_toolkit() == CudaToolkit(str(home))
    monkeypatch.setenv("CUDA_HOME", str(runtime_only))
    refused = f"CUDA_HOME={runtime_only} has no executable bin/nvcc"
    assert find_cuda_toolkit() == CudaToolkit(None, refused)


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize("release", ["12.4", "12.8", "12.9", None])
def test_the_extras_compiler_replaces_an_older_one_or_none_at_all_and_says_so_once(
    monkeypatch, tmp_path, caplog, name, release
):
    """PyTorch refuses to compile with another major version than its own (pytorch3d issue 1786)."""
    ours = toolkit(tmp_path / "packages" / "nvidia" / "cu13")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    hosts = tmp_path / "cuda"
    if release:
        toolkit(hosts, release)
    monkeypatch.setenv(name, str(hosts))
    assert {find_cuda_toolkit() for _ in range(3)} == {CudaToolkit(str(ours))}
    (said,) = caplog.messages
    found = (
        f"is of release {release}, and at least 13.0" if release else "has no executable bin/nvcc"
    )
    assert (
        said.startswith(f"{name}={hosts}") and found in said and said.endswith("extra gpu instead")
    )


def test_a_toolkit_as_new_as_the_extras_is_kept_and_nothing_is_said(monkeypatch, tmp_path, caplog):
    toolkit(tmp_path / "packages" / "nvidia" / "cu13")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for release in ("13.0", "13.2"):
        home = toolkit(tmp_path / f"cuda-{release}", release)
        monkeypatch.setenv("CUDA_HOME", str(home))
        assert find_cuda_toolkit() == CudaToolkit(str(home))
    assert not caplog.messages


def test_an_extra_that_cannot_compile_replaces_nothing(monkeypatch, tmp_path, caplog):
    """Its libraries are there, as with torch alone, or its compiler is as old."""
    libraries = tmp_path / "packages" / "nvidia" / "cu13"
    (libraries / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.8")))
    for _ in range(2):
        assert "release 12.8, and at least 12.9" in find_cuda_toolkit().problem
        toolkit(libraries, "12.8")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("release", "problem"),
    [("12.8", "release 12.8, and at least 12.9 is needed"), ("12.9", ""), ("13.5", "")],
)
def test_an_old_compiler_is_refused_by_its_release(monkeypatch, tmp_path, release, problem):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", release)))
    found = find_cuda_toolkit()
    assert (found.home is None) == bool(problem) and problem in found.problem


def test_a_compiler_that_cannot_be_run_or_says_no_release_is_refused(monkeypatch, tmp_path):
    nvcc = toolkit(tmp_path / "cuda") / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    nvcc.write_text("#!/bin/sh\necho hello\n")
    assert "names no release" in find_cuda_toolkit().problem
    nvcc.write_bytes(b"\x7fELF")
    assert "cannot be run" in find_cuda_toolkit().problem


def test_a_compiler_without_its_host_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs g++, which is not on PATH" in find_cuda_toolkit().problem


def test_where_nothing_is_found_the_places_are_said(monkeypatch):
    monkeypatch.setattr(machine, "_homes", lambda: iter(()))
    assert "CUDA_HOME, the packages of the extra gpu, PATH" in find_cuda_toolkit().problem
