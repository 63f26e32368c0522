import shutil

import pytest

from medspeed.benchmarks.fake_cuda import shim


@pytest.fixture
def torch_folder(tmp_path, monkeypatch):
    """A torch that has nothing but its version."""
    monkeypatch.setattr(shim, "_TORCH", tmp_path)
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    return tmp_path


def test_without_a_compiler_it_says_so(torch_folder, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler" in (shim.why_not() or "")
    monkeypatch.setenv("CXX", "clang++")
    assert shim.why_not() is None


def test_a_torch_with_cuda_is_left_alone(torch_folder, monkeypatch):
    monkeypatch.setenv("CXX", "clang++")
    (torch_folder / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    assert "built for CUDA" in (shim.why_not() or "")


def test_what_the_compiler_says_is_told(torch_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"fake CUDA: false .*shim\.cpp"):
        shim._build(shim._SOURCE)
    assert not list((tmp_path / ".cache" / "medspeed" / "fake_cuda").iterdir())
