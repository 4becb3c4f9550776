"""`ltc run` gives a script no more rights than Python does: what it may read, load, import and show to others."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import os, stat, sys
before = os.umask(0)
os.umask(before)
print("umask", oct(before))
open("made.txt", "w").close()
os.mkdir("made")
print("modes", oct(stat.S_IMODE(os.stat("made.txt").st_mode)), oct(stat.S_IMODE(os.stat("made").st_mode)))
print("environment", sorted(os.environ.items()))
import torch
print("device", torch.ones(2).add(1).tolist())
try:
    torch.load("planted.pt")
except Exception as error:
    print("planted file", type(error).__name__)
try:
    import planted
except ImportError as error:
    print("planted module", error)
print("path", sys.path)
"""


class Exploit:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploited",)


def shown(folder: Path, script: Path, *options: str) -> str:
    """What the script prints when it is run so, in a folder with files that somebody else has put there."""
    folder.mkdir()
    (folder / "planted.pt").write_bytes(pickle.dumps(Exploit()))
    (folder / "planted.py").write_text("print('imported')")
    variables = {key: value for key, value in os.environ.items() if not key.startswith("LTC_") or key == "LTC_NATIVE"}
    done = subprocess.run(
        [sys.executable, *options, str(script)],
        cwd=folder,
        env={**variables, "LTC_CACHE_DIR": "cache"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        umask=0o027,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "exploited").exists()
    return done.stdout


@pytest.mark.parametrize("safe_path", [False, True])
def test_a_script_has_the_rights_that_it_has_in_python(tmp_path: Path, safe_path: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHOW)
    options = ["-P"] if safe_path else []
    plain = shown(tmp_path / "plain", script, *options)
    ours = shown(tmp_path / "ours", script, *options, "-m", "torch_ltc", "run")
    assert ours == plain
    assert "modes 0o640 0o750" in ours
    assert "planted file UnpicklingError" in ours
    assert "planted module No module named 'planted'" in ours
    assert str(tmp_path / "ours") not in ours


def test_what_is_written_of_a_run_is_for_the_user_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nfor _ in range(3):\n    x = torch.ones(3).to('ltc') * 2\n    x.tolist()\n")
    command = ["-m", "torch_ltc", "run", "--set", "tiers=blocking", "--record", "run.json", "--report", "run.html"]
    shown(tmp_path / "folder", script, *command)
    made = [path for path in (tmp_path / "folder").rglob("*") if not path.name.startswith("planted")]
    assert {"run.json", "run.html", "cache"} <= {path.name for path in made}
    assert any(path.suffix == ".ltc" for path in made)
    for path in made:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
