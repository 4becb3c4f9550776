"""What every worker process needs and may share: PyTorch and its operator database, imported once before forking.

The device's package is not here: it may start threads, which do not survive a fork.
"""

import importlib
import warnings

# PyTorch's test modules warn about optional packages when they are imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("tests.ops.child")
