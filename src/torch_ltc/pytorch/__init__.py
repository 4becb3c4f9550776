"""The seam to PyTorch: every private interface of PyTorch that the package uses or replaces, with the reasons.

Importing it refuses a PyTorch that the package was not tested with, before anything of PyTorch is looked up.
"""

from torch_ltc.pytorch.versions import check_torch_version

check_torch_version()
