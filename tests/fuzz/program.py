"""Random programs as data: statements of Python over numbered tensors, and the numbers that they are run with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz import runner

_SCRIPT = '''"""{title}

{difference}

Run it with `python {name}.py`: the statements run on the oracle and on the device, and what differs is printed. Needs
torch and torch_ltc alone; below the program is what runs and compares it.
"""

from __future__ import annotations
{environment}
SETTINGS = {settings}
CAPTURED = {captured}
THREADS = {threads}
SEED = {seed}
# One execution for each.
VARIANTS = {variants}
STATEMENTS = [
{statements}
]

{runner}

if __name__ == "__main__":
    raise SystemExit(main(STATEMENTS, VARIANTS, SEED, THREADS, SETTINGS, CAPTURED))
'''


@dataclass(frozen=True)
class Program:
    """Statements, and for each execution the values of the names that are not tensors (`n0`, `k1`, `A`)."""

    name: str
    seed: int
    statements: tuple[str, ...]
    variants: tuple[dict[str, Any], ...] = ({},)
    threads: int = 1

    @property
    def kind(self) -> str:
        """One of those that `generate` makes."""
        return self.name.partition("-")[0]

    def lines(self) -> str:
        """The statements as they would stand in a script."""
        return "\n".join(self.statements)

    @classmethod
    def from_source(cls, name: str, text: str) -> Program:
        """The program of a file: statements with empty lines between them, run three times."""
        statements = [block for block in text.strip().split("\n\n") if block]
        numbers: dict[str, Any] = {"n0": 1.5, "n1": 0.5, "n2": -2.0, "k0": 1, "k1": 2, "A": 2, "B": 3, "C": 4}
        return cls(name, 0, tuple(statements), (numbers, numbers, {**numbers, "n0": 2.5}))


@dataclass(frozen=True)
class Mode:
    """Settings under which programs run on the device, and what is promised of the results."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    # Environment variables: what is read once a process.
    environment: dict[str, str] = field(default_factory=dict)
    # Graphs are captured, on the CPU by a stand-in.
    captured: bool = False
    # Results are eager's to the bit; else within a tolerance.
    equal: bool = True


def script(program: Program, mode: Mode, difference: str) -> str:
    """A script of its own that shows the difference."""
    environment = "".join(
        f"\nimport os\n\nos.environ.setdefault({name!r}, {value!r})" for name, value in mode.environment.items()
    )
    return _SCRIPT.format(
        title=f"Program {program.name} differs from eager in mode {mode.name}.",
        difference=difference.replace("\\", "/").replace('"""', "'''"),
        name=program.name,
        environment=environment,
        settings=mode.settings,
        captured=mode.captured,
        threads=program.threads,
        seed=program.seed,
        variants=list(program.variants),
        statements="\n".join(f"    {statement!r}," for statement in program.statements),
        runner=Path(runner.__file__).read_text(encoding="utf-8").split("# --- imports\n", 1)[1],
    )
