"""The table of device time by kind of kernel."""

from __future__ import annotations

import pytest

from benchmarks.kernels import kind_of, table


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("triton_for_fused_add_0", "triton foreach"),
        ("triton_poi_fused_add_0", "triton pointwise"),
        ("triton_red_fused_sum_1", "triton reduction"),
        ("void at::native::multi_tensor_apply_kernel", "foreach"),
        ("nvjet_hsh_128x256", "matrix product"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("unknown", "other"),
    ],
)
def test_kernels_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_and_launches_are_per_step() -> None:
    lines = table("jit", {"triton_poi_fused": [1.0] * 20, "Memcpy DtoD": [0.5] * 10}, 1).splitlines()
    assert "| triton pointwise | 2.000 | 2 |" in lines
    assert "| copy | 0.500 | 1 |" in lines
    assert "| all | 2.500 | |" in lines
    assert lines[-1] == "| triton_poi_fused | 2.000 | 2 |"
