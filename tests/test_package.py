"""What is installed is what git lists, and importing it costs nothing until it is used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import cake_infer
import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("tests", "bench", "docs", "examples")  # top-level folders that are not part of the package
HEAVY = ("torch", "numpy", "tokenizers", "transformers", "huggingface_hub", "jinja2", "safetensors")


def git_files() -> list[str]:
    """Files that git knows, or would take up with the next `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def git_modules() -> set[str]:
    """The package's modules, as paths from the root."""
    paths = (PurePosixPath(name) for name in git_files())
    return {str(path) for path in paths if path.suffix == ".py" and path.parts[0] not in OUTSIDE}


def project() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, cake_infer; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code).stdout.strip() == "[]"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_command_answers_without_anything_heavy(argument: str) -> None:
    code = f"""
import runpy, sys
sys.argv = ["cake-infer", {argument!r}]
try:
    runpy.run_module("cake_infer", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    print("exit", stop.code)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    lines = run_python(code).stdout.splitlines()
    assert lines[-1] == "[]"
    assert lines[-2] in ("exit 0", "exit None")


def test_python_m_prints_the_version() -> None:
    command = [sys.executable, "-m", "cake_infer", "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    assert cake_infer.__version__ in answer.stdout


def test_a_second_ctrl_c_while_the_interpreter_cleans_up_ends_it_at_once() -> None:
    code = """
import atexit, os, signal, sys
from cake_infer import __main__, cli
cli.main = lambda: int(sys.argv[1])
atexit.register(os.kill, os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(__main__.main())
"""
    interrupted, ended = run_python(code, "130"), run_python(code, "0")
    assert (interrupted.returncode, interrupted.stderr) == (-signal.SIGINT, "")
    assert "KeyboardInterrupt" in ended.stderr


def test_the_version_is_the_projects() -> None:
    assert project()["project"]["version"] == cake_infer.__version__


def test_every_entry_point_names_what_there_is() -> None:
    told = project()["project"]
    groups = [told["scripts"], *told["entry-points"].values()]
    points = [point for group in groups for point in group.values()]
    assert len(points) >= 4
    for point in points:
        module, _, name = point.partition(":")
        source = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
        assert not name or f"\ndef {name}(" in source or f"\nclass {name}(" in source, point


def test_a_ctrl_c_that_breaks_an_import_off_ends_it_without_a_word() -> None:
    """Torch catches what strikes while it imports numpy, which can then not be imported any more."""
    code = """
import os, signal, sys
from cake_infer import __main__, cli
signal.signal(signal.SIGINT, signal.default_int_handler)

def broken():
    try:
        if sys.argv[1] == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
    except KeyboardInterrupt:
        pass
    raise ImportError("cannot load module more than once per process")

cli.main = broken
sys.exit(__main__.main())
"""
    interrupted, alone = run_python(code, "interrupted"), run_python(code, "alone")
    assert (interrupted.returncode, interrupted.stdout, interrupted.stderr) == (130, "", "")
    assert alone.returncode == 1
    assert "more than once" in alone.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a system without a full disk to write to")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["eval", "--help"], ["policies"]])
def test_help_that_cannot_be_written_is_an_error(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "cake_infer", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot ")
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_public_name_is_there() -> None:
    missing = [name for name in cake_infer.__all__ if not hasattr(cake_infer, name)]
    assert missing == []
    assert set(cake_infer.__all__) == {*cake_infer._HOME, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        cake_infer.Nonsense  # noqa: B018


def test_errors_of_the_package_are_one_family() -> None:
    from cake_infer.errors import CakeError

    assert cake_infer.CakeError is CakeError
    assert issubclass(cake_infer.BudgetError, CakeError)


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {str(PurePosixPath(name).parent) for name in git_modules()}
    expected = {".".join(["cake_infer", *PurePosixPath(folder).parts]): folder for folder in folders}
    setuptools = project()["tool"]["setuptools"]
    assert isinstance(setuptools, dict)
    assert sorted(setuptools["packages"]) == sorted(expected)
    assert setuptools["package-dir"] == expected
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", ["models/new.py", "cache/new.py", "engine/apps/new.py", "cache/policies/new.py"])
def test_git_does_not_ignore_the_packages_folders(name: str) -> None:
    ignored = subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT, check=False)
    assert ignored.returncode == 1


def test_a_wheel_holds_exactly_the_modules_of_git(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in git_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert built.returncode == 0, built.stderr
    said = built.stdout + built.stderr
    assert "copying engine/serving/static/page.html" in said  # what the build says is shown, and so are its warnings
    assert "Package would be ignored" not in said
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folder = f"cake_infer-{cake_infer.__version__}.dist-info"
    inside = {name.removeprefix("cake_infer/") for name in names if not name.startswith(f"{folder}/")}
    static = {name for name in git_files() if name.startswith("engine/serving/static/")}
    assert {"engine/serving/static/page.html", "engine/serving/static/chat.js"} <= static
    assert inside == git_modules() | static | {"py.typed"}
    assert f"{folder}/licenses/LICENSE" in names
    with zipfile.ZipFile(wheel) as archive:
        assert "cake-infer = cake_infer.__main__:main" in archive.read(f"{folder}/entry_points.txt").decode()
