"""Builds the wheel and the source distribution, installs each into an empty environment, and uses it from there.

    python scripts/release_check.py

The environment gets the PyTorch of requirements/torch.txt first: installing the package must leave it as it is. Of the
extension in C++ nothing is built: `ltc build` does that where the package is used. The version is that of HEAD's tag; a
tag that only a copy of the repository has shows that it is.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files that Python does not import, which a distribution may lack without an error here.
DATA = (
    "torch_ltc/py.typed", "torch_ltc/debug/repro_script.txt", "torch_ltc/debug/report/assets/page.html",
    "torch_ltc/debug/report/vendor/charts.min.js", "torch_ltc/native/module.cpp", "torch_ltc_autoload.py",
)  # fmt: skip
SMOKE = """
import pathlib, sys
import torch

# The entry point of PyTorch has made the name known, and loaded nothing.
assert "torch_ltc" not in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("ltc")
import torch_ltc
assert pathlib.Path(torch_ltc.__file__).is_relative_to(sys.prefix), torch_ltc.__file__
optimizer = torch.optim.Adam(model.parameters())
losses = []
for step in range(3):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(torch.ones(4, 8).to("ltc")), torch.arange(4).to("ltc") % 2)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[0] > losses[-1], losses
torch_ltc.report("report.html")
assert "<html" in pathlib.Path("report.html").read_text()[:1000].lower()
assert "ltc" in torch._dynamo.list_backends()
print("version", torch_ltc.__version__)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command prints; raises when it fails."""
    variables = {"PATH": "/usr/bin:/bin", "LTC_NATIVE": "0", "HOME": str(cwd)}
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False,
                          env={**pip_variables(), **variables})  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def pip_variables() -> dict[str, str]:
    """What the caller has set for pip, and nothing else of the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}


def build(source: Path, folder: Path) -> list[Path]:
    """The distributions of a repository."""
    folder.mkdir()
    for kind in ("sdist", "wheel"):
        code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
        run(sys.executable, "-c", code, folder, cwd=source)
    return sorted(folder.iterdir())


def versions_of(distributions: list[Path]) -> set[str]:
    """The versions in the names of a source distribution and a wheel."""
    return {distribution.name.removesuffix(".tar.gz").split("-")[1] for distribution in distributions}


def check_tag(source: Path, folder: Path) -> None:
    """Distributions made from a commit with a tag have its version, and those of a later one are told apart."""
    author = ("-c", "user.name=check", "-c", "user.email=check@example.invalid")
    commit = ("git", *author, "commit", "--quiet", "--allow-empty", "--message", "an empty one")
    run(*commit, cwd=source)
    run("git", "tag", "v98.7.6", cwd=source)
    tagged = versions_of(build(source, folder / "tagged"))
    run(*commit, cwd=source)
    later = versions_of(build(source, folder / "later"))
    name = run("git", "rev-parse", "--short=7", "HEAD", cwd=source).strip()
    if tagged != {"98.7.6"} or any(not version.startswith(f"98.7.6+1.g{name}") for version in later):
        raise SystemExit(f"the tag is v98.7.6, and the versions are {tagged}, and with a commit more {later}")
    print(f"tag v98.7.6 gives version {tagged.pop()}, and a commit later {later.pop()}")


def names(distribution: Path) -> set[str]:
    """Names of the files in it, as they are when installed."""
    if distribution.suffix == ".whl":
        return set(zipfile.ZipFile(distribution).namelist())
    with tarfile.open(distribution) as archive:
        return {re.sub(r"^[^/]+/(src/)?", "", name) for name in archive.getnames()}


def check(distribution: Path, folder: Path, python: Path) -> str:
    """Install it, use it, take it out again; returns the version that it says."""
    missing = [name for name in DATA if name not in names(distribution)]
    if missing:
        raise SystemExit(f"{distribution.name} lacks {', '.join(missing)}")
    before = torch_of(python)
    run(python, "-m", "pip", "install", "--quiet", "--no-build-isolation", distribution, cwd=folder)
    if torch_of(python) != before:
        raise SystemExit(f"{distribution.name} changes torch from {before} to {torch_of(python)}")
    print(f"{distribution.name}: installed, torch is {before} as before")
    empty = Path(tempfile.mkdtemp(dir=folder))
    version = run(python, "-c", SMOKE, cwd=empty).split()[-1]
    run(python.parent / "ltc", "backends", cwd=empty)
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torch-ltc", cwd=folder)
    print(f"{distribution.name}: works, version {version}")
    return version


def torch_of(python: Path) -> str:
    return run(python, "-c", "import importlib.metadata as m; print(m.version('torch'))").strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        run("git", "clone", "--quiet", ROOT, source)
        distributions = build(source, folder / "made")
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        requirements = ("--requirement", ROOT / "requirements" / "torch.txt", "setuptools", "numpy")
        run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements" / "constraints.txt",
            *requirements)  # fmt: skip
        versions = {check(distribution, folder, python) for distribution in distributions}
        check_tag(source, folder)
    if len(distributions) != 2 or len(versions) != 1:
        raise SystemExit(f"two distributions of one version are expected: {distributions}, {versions}")
    [version] = versions
    tags = run("git", "tag", "--points-at", "HEAD", "--list", "v[0-9]*").split()
    if tags and f"v{version}" not in tags:
        raise SystemExit(f"HEAD has the tag {', '.join(tags)}, and the version is {version}")
    print(f"version {version}" + (f", tag v{version}" if tags else ", no tag at HEAD"))


if __name__ == "__main__":
    main()
