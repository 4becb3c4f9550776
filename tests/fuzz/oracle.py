"""`python -m tests.fuzz.oracle DEVICE`: eager on a device, in a process without the package.

Programs come as pickles.
"""

from __future__ import annotations

import os
import pickle
import sys

import torch

from tests.fuzz import runner


def main(device: str) -> int:
    """Answer until there is no more."""
    # What kernels print must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    while True:
        try:
            program = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        seen = runner.run(program.statements, device, program.variants, program.seed, program.threads)
        pickle.dump(seen, answers)
        answers.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
