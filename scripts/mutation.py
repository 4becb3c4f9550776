"""Mutation testing of the core: change one thing in the code, run the tests of that module, see whether one fails.

    python scripts/mutation.py --sample 40 --jobs 2 --seconds 1200

Cosmic Ray makes the changes of Python (`pip install -r requirements/mutation.txt`, into an environment of its own if
need be: `--tool` names its program); those of C++ are made here: the changed file alone is compiled, with PyTorch's
headers compiled before. Of each place in the code one change is drawn; annotations, which never run, what only words
a message, and bounds at the top of a module (`_MOST_CAPTURES = 8`), of which another would be as right, are left out.
Each job works on a copy of the project of its own, under `build/mutation`. Files of tests that have noticed changes
run first. What was tried is kept there: the next run goes on with other changes. The score of each module and the
changes that no test noticed are printed, and written to `build/mutation/report.md`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mutation"
# A mutant may loop for ever.
LIMIT_S = 600.0
TEST_LIMIT_S = 90

# The quick ones first.
_RECORDING = (
    "tests/unit/test_recorder.py tests/unit/test_invariants.py tests/semantics/test_resize_and_views.py "
    "tests/semantics/test_strides.py tests/semantics/test_programs.py tests/semantics/test_aliasing.py"
)
_NATIVE = (
    "tests/semantics/test_native_composites.py "
    + _RECORDING
    + " tests/semantics/test_gradients.py tests/semantics/test_native_hits.py tests/semantics/test_native.py "
    "tests/semantics/test_random.py tests/semantics/test_threads.py tests/models/test_training.py"
)
# The core, and the tests that know each part; with the extension in C++ (1) or without it (0).
CORE = {
    "record/recorder.py": (
        0,
        _RECORDING
        + " tests/debug/test_sources.py tests/semantics/test_native.py tests/semantics/test_copy_on_write.py",
    ),
    "record/pending_state.py": (0, _RECORDING),
    "record/path_values.py": (0, _RECORDING + " tests/semantics/test_undeclared_writes.py"),
    "record/native_nodes.py": (1, _RECORDING + " tests/semantics/test_native_hits.py"),
    "program/tree.py": (0, "tests/unit/test_tree.py tests/unit/test_program_cache.py " + _RECORDING),
    "execute/sync.py": (
        1,
        "tests/unit/test_invariants.py tests/semantics/test_runs_once.py tests/semantics/test_reads_here.py "
        "tests/semantics/test_failures.py tests/semantics/test_async.py tests/semantics/test_api.py "
        "tests/semantics/test_long_programs.py",
    ),
    "compile/specialization_cache.py": (
        1,
        "tests/unit/test_specialization_cache.py tests/unit/test_symbolic_key.py tests/semantics/test_promotion.py "
        "tests/semantics/test_promotion_failures.py",
    ),
    "program/symbolic_key.py": (
        1,
        "tests/unit/test_symbolic_key.py tests/unit/test_specialization_cache.py tests/semantics/test_promotion.py",
    ),
    "execute/captured_program.py": (
        1,
        "tests/unit/test_cuda_graphs.py tests/semantics/test_capture.py",
    ),
    "execute/capture.py": (1, "tests/unit/test_cuda_graphs.py tests/semantics/test_capture.py"),
    **dict.fromkeys(("native/recorder.cpp", "native/compare.cpp", "native/buffer.cpp"), (1, _NATIVE)),
    **dict.fromkeys(("native/recorder_bindings.cpp", "native/node_bindings.cpp"), (1, _NATIVE)),
    **dict.fromkeys(("native/kernel.cpp", "native/typed_kernel.cpp", "native/composites.cpp"), (1, _NATIVE)),
    **dict.fromkeys(("native/attention.cpp", "native/empties.cpp"), (1, _NATIVE)),
    "native/holdings.cpp": (1, "tests/unit/test_memory.py " + _NATIVE),
    "native/eager.cpp": (1, "tests/semantics/test_eager_region.py " + _NATIVE),
    "native/interpreter.cpp": (1, "tests/semantics/test_native_calls.py tests/unit/test_interpreter.py " + _NATIVE),
    "native/replay.cpp": (1, "tests/semantics/test_jit.py tests/semantics/test_steady.py " + _NATIVE),
    "native/buffer_bindings.cpp": (
        1,
        "tests/unit/test_memory.py tests/semantics/test_async.py tests/semantics/test_capture.py "
        "tests/semantics/test_jit.py tests/semantics/test_replays.py " + _NATIVE,
    ),
    "native/generator.cpp": (1, "tests/semantics/test_random.py tests/semantics/test_native.py"),
    **dict.fromkeys(
        ("native/tensors.cpp", "native/allocator.cpp", "native/guard.cpp", "native/hooks.cpp", "native/conversion.cpp"),
        (1, _NATIVE + " tests/semantics/test_devices.py tests/semantics/test_serialization.py"),
    ),
    "native/steady.cpp": (1, "tests/semantics/test_steady.py tests/semantics/test_jit.py " + _NATIVE),
}
# In C++: a word or sign, and what it becomes.
_SWAPS = {
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "true": "false",
    "false": "true",
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " + ": " - ",
    " - ": " + ",
    "++": "--",
    "+=": "-=",
    "return false;": "return true;",
}
_SWAPPED = re.compile("|".join(re.escape(each) for each in sorted(_SWAPS, key=len, reverse=True)))
# Texts and comments, and what the preprocessor reads.
_IDLE_CPP = re.compile(r'"(?:[^"\\\n]|\\.)*"|//.*|^\s*#.*|TORCH_CHECK.*', re.MULTILINE)


def idle_lines(source: str) -> set[int]:
    """Lines whose change says nothing: annotations, texts, bounds, and what only type checkers read."""
    idle: set[int] = set()
    module = ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            idle.add(node.lineno)
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = [node.returns, *(a.annotation for a in (*node.args.args, *node.args.kwonlyargs))]
            idle |= {line for a in found if a is not None for line in range(a.lineno, (a.end_lineno or a.lineno) + 1)}
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            idle.add(node.lineno)
        elif isinstance(node, ast.JoinedStr):
            idle |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            idle |= set(range(node.lineno, node.body[-1].lineno + 1))
    return idle


def digest_of_project() -> str:
    """A digest of the code and its tests: what passed with it passes again."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


class Extension:
    """Builds the extension of a copy of the project file by file, so that one changed file is compiled alone."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "src" / "torch_ltc" / "native"
        self.objects = folder / "objects"
        self.library = folder / "cache" / "torch_ltc" / "native"
        for made in (self.objects, self.library):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec = importlib.util.spec_from_file_location("compiler_of_a_job", self.sources / "compiler.py")
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module
        spec.loader.exec_module(self.module)
        self.compiler = self.module.find_compiler()
        self.built: dict[str, bytes] = {}

    def build(self) -> bool:
        """Compile what has changed, and link; False where the compiler refuses it."""
        flags = [flag for flag in self.compiler.compile_flags() if flag not in ("-O2", "-Wall", "-Wextra")]
        command = [*self.compiler.command, *flags, "-O0", "-w", "-I", str(self.sources)]
        header = self.objects / "system.h"
        if not header.exists():
            texts = [path.read_text() for path in sorted(self.sources.glob("*.[ch]*")) if path.suffix in (".cpp", ".h")]
            found = dict.fromkeys(re.findall(r"^#include <.*>$", "\n".join(texts), re.MULTILINE))
            header.write_text("\n".join(["#include <torch/csrc/utils/pybind.h>", *found]) + "\n")
            subprocess.run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
        for source in sorted(self.sources.glob("*.cpp")):
            text = self.module._text(source)
            if self.built.get(source.name) != text:
                made = [*command, "-include", str(header), "-c", str(source), "-o", str(self.object_of(source))]
                if subprocess.run(made, capture_output=True).returncode:
                    self.built.pop(source.name, None)
                    return False
                self.built[source.name] = text
        for library in self.library.glob("*.so"):
            library.unlink()
        target = self.library / self.module.library_name()
        objects = [str(self.object_of(source)) for source in sorted(self.sources.glob("*.cpp"))]
        link = [*self.compiler.command, *objects, "-o", str(target), *self.compiler.link_flags()]
        linked = subprocess.run(link, capture_output=True).returncode == 0
        if linked:
            target.chmod(0o700)
        return linked

    def object_of(self, source: Path) -> Path:
        """Where a source is compiled to."""
        return self.objects / f"{source.stem}.o"


class Job:
    """One copy of the project, in which one mutant at a time is tried."""

    def __init__(self, number: int, tool: str) -> None:
        self.folder = FOLDER / f"job-{number}"
        self.tool = tool
        self.extension: Extension | None = None
        # By file of tests, how many changes it has noticed.
        self.noticed: Counter[str] = Counter()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name in ("src", "tests", "pyproject.toml", "docs", "benchmarks", "examples", "README.md", "scripts"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.folder / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
            elif source.exists():
                shutil.copy(source, self.folder / name)

    def command(self, module: str) -> list[str]:
        """The tests of a module, in one process, ending at the first that fails."""
        tests = sorted(dict.fromkeys(CORE[module][1].split()), key=lambda name: -self.noticed[name])
        return [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider",
                "-o", f"timeout={TEST_LIMIT_S}",
                "-m", "not slow and not compilers and not browser and not distributed", *tests]  # fmt: skip

    def run_tests(self, module: str, limit_s: float) -> str:
        """ "killed", "survived" or "timeout", and what was printed last."""
        env = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1",
               "PYTHONDONTWRITEBYTECODE": "1", "LTC_NATIVE": str(CORE[module][0])}  # fmt: skip
        # For a module in Python the extension is the one that `ltc build` has made.
        if module.endswith(".cpp"):
            env["XDG_CACHE_HOME"] = str(self.folder / "cache")
            self.extension = self.extension or Extension(self.folder)
            if not self.extension.build():
                return "refused"
        try:
            done = subprocess.run(
                self.command(module), cwd=self.folder, env=env, timeout=limit_s, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "timeout"
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py)", done.stdout, re.MULTILINE)
        if failed:
            self.noticed[failed[1]] += 1
        return "survived" if done.returncode == 0 else "killed"

    def mutants(self, module: str) -> list[dict[str, object]]:
        """All changes that are known for a module."""
        if module.endswith(".cpp"):
            return cpp_mutants((self.folder / "src" / "torch_ltc" / module).read_text())
        path = f"src/torch_ltc/{module}"
        config = self.folder / "mutation.toml"
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{path}"\ntimeout = {LIMIT_S}\nexcluded-modules = []\n'
            'test-command = "true"\n[cosmic-ray.distributor]\nname = "local"\n'
        )
        session = self.folder / "session.sqlite"
        session.unlink(missing_ok=True)
        subprocess.run([self.tool, "init", str(config), str(session)], cwd=self.folder, check=True, capture_output=True)
        with sqlite3.connect(session) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute("select * from mutation_specs")]

    def try_one(self, module: str, mutant: dict[str, object]) -> tuple[str, str]:
        """What becomes of one change, and the change as a diff."""
        path = self.folder / "src" / "torch_ltc" / module
        before = path.read_text()
        try:
            if module.endswith(".cpp"):
                begin = int(str(mutant["occurrence"]))
                old, new = str(mutant["old"]), str(mutant["new"])
                after = before[:begin] + new + before[begin + len(old) :]
                path.write_text(after)
                return self.run_tests(module, LIMIT_S), changed_lines(before, after)
            subprocess.run(
                [self.tool, "apply", str(path.relative_to(self.folder)), str(mutant["operator_name"]),
                 str(mutant["occurrence"])], cwd=self.folder, check=True, capture_output=True,
            )  # fmt: skip
            after = path.read_text()
            return self.run_tests(module, LIMIT_S), changed_lines(before, after)
        finally:
            path.write_text(before)


def cpp_mutants(source: str) -> list[dict[str, object]]:
    """All changes of a file in C++, in the form of Cosmic Ray's."""
    code = _IDLE_CPP.sub(lambda match: " " * len(match[0]), source)
    return [
        {
            "operator_name": f"{match[0].strip()} {_SWAPS[match[0]].strip()}",
            "occurrence": match.start(),
            "old": match[0],
            "new": _SWAPS[match[0]],
            "start_pos_row": source.count("\n", 0, match.start()) + 1,
            "start_pos_col": match.start(),
        }
        for match in _SWAPPED.finditer(code)
    ]


def changed_lines(before: str, after: str) -> str:
    """The first line that differs, before and after."""
    for number, (old, new) in enumerate(zip(before.splitlines(), after.splitlines(), strict=False), 1):
        if old != new:
            return f"{number}: `{old.strip()}` became `{new.strip()}`"
    return "nothing"


def drawn(module: str, mutants: list[dict[str, object]], seed: int) -> list[dict[str, object]]:
    """One change for each place, in an order of chance that is the same each time."""
    source = (ROOT / "src" / "torch_ltc" / module).read_text()
    lines = set() if module.endswith(".cpp") else idle_lines(source)
    places: dict[tuple[object, object], list[dict[str, object]]] = defaultdict(list)
    for mutant in mutants:
        if mutant["start_pos_row"] not in lines and "BitOr_" not in str(mutant["operator_name"]):
            places[mutant["start_pos_row"], mutant["start_pos_col"]].append(mutant)
    chance = random.Random(f"{seed}/{module}")
    chosen = [chance.choice(found) for _, found in sorted(places.items(), key=lambda item: str(item[0]))]
    chance.shuffle(chosen)
    return chosen


def main() -> int:
    """Try a sample of each module, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=40, help="changes of each module")
    parser.add_argument("--modules", default=",".join(CORE), help="modules of the core, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tool", default=shutil.which("cosmic-ray") or "cosmic-ray", help="Cosmic Ray's program")
    options = parser.parse_args()
    if shutil.which(options.tool) is None:
        parser.error(f"there is no {options.tool}\n  try: pip install -r requirements/mutation.txt")
    unknown = set(options.modules.split(",")) - set(CORE)
    if unknown:
        parser.error(f"{sorted(unknown)} are not modules of the core; these are: {', '.join(CORE)}")
    modules = options.modules.split(",")
    ends = time.monotonic() + options.seconds
    journal_file = FOLDER / "journal.json"
    jobs = [Job(number, options.tool) for number in range(options.jobs)]
    journal = json.loads(journal_file.read_text()) if journal_file.exists() else {}
    queue: list[tuple[str, dict[str, object]]] = []
    samples = {module: drawn(module, jobs[0].mutants(module), options.seed)[: options.sample] for module in modules}
    for place in range(options.sample):
        queue += [(module, chosen[place]) for module, chosen in samples.items() if place < len(chosen)]
    # Modules whose tests pass without any change; those of earlier runs need not be tried again.
    clean_file = FOLDER / "clean.json"
    kept = json.loads(clean_file.read_text()) if clean_file.exists() else {}
    digest = digest_of_project()
    clean: dict[str, bool] = dict.fromkeys(kept.get(digest, []), True)

    def work(job: Job) -> None:
        while queue and time.monotonic() < ends:
            module, mutant = queue.pop(0)
            name = f"{module} {mutant['operator_name']} {mutant['occurrence']}"
            if name in journal:
                continue
            if module not in clean:
                clean[module] = job.run_tests(module, 3 * LIMIT_S) == "survived"
                clean_file.write_text(json.dumps({digest: [name for name, passed in clean.items() if passed]}))
                if not clean[module]:
                    print(f"{module}: its tests fail without any change", file=sys.stderr)
            if clean[module]:
                outcome, change = job.try_one(module, mutant)
                journal[name] = [module, outcome, change]
                print(f"{outcome:9}{module} {change}", flush=True)
                journal_file.write_text(json.dumps(journal, indent=1))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, jobs))
    report = report_text(list(journal.values()))
    (FOLDER / "report.md").write_text(report)
    print(report)
    return 0 if all(clean.values()) else 1


def report_text(rows: list[list[str]]) -> str:
    """Scores by module, and survivors."""
    lines = ["| module | changes tried | noticed | score |", "|---|---|---|---|"]
    for module in [*CORE, "all"]:
        outcomes = [outcome for one, outcome, _ in rows if module in (one, "all") and outcome != "refused"]
        if outcomes:
            noticed = sum(outcome != "survived" for outcome in outcomes)
            lines.append(f"| `{module}` | {len(outcomes)} | {noticed} | {100 * noticed / len(outcomes):.0f} % |")
    survivors = [f"- `{module}` {change}" for module, outcome, change in rows if outcome == "survived"]
    return "\n".join([*lines, "", *sorted(survivors)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
