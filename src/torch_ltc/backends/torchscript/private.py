"""Private interfaces of PyTorch that this backend uses, and why."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torch_ltc.pytorch.entries import Interface, Risk
from torch_ltc.pytorch.table import table

__all__ = ["Graph", "ListType", "OptionalType", "ScriptList", "TupleType", "parse_ir", "parse_schema"]

Graph = torch._C.Graph
ListType, OptionalType, TupleType = torch._C.ListType, torch._C.OptionalType, torch._C.TupleType
ScriptList = torch._C.ScriptList
parse_ir, parse_schema = torch._C.parse_ir, torch._C.parse_schema
create_function = torch._C._create_function_from_graph
compile_syntax: Any = torch._C._jit_script_compile
syntax: Any = torch._C._jit_tree_views
TENSOR = torch._C.TensorType.get()
NUMBER = torch._C.NumberType.get()
GENERATOR = torch._C._GeneratorType.get()
SCALAR_TYPES = {
    int: torch._C.IntType.get(),
    float: torch._C.FloatType.get(),
    bool: torch._C.BoolType.get(),
    complex: torch._C.ComplexType.get(),
}

_ALL, _LINES, _DISK = "the torchscript backend", "lines in errors of compiled programs", "the disk cache of programs"
# fmt: off
table.add(
    Interface("torch._C.Graph", "builds the graph of a program", _ALL, Risk.STABLE,
              check=lambda kind: {"insertConstant", "addInput", "registerOutput", "lint"} <= set(vars(kind))),
    *(Interface(f"torch._C.{name}", "types of values in a graph", _ALL, Risk.STABLE,
              check=inspect.isclass) for name in (
        "TensorType", "NumberType", "_GeneratorType", "IntType", "FloatType", "BoolType", "ComplexType", "ListType",
        "OptionalType", "TupleType")),
    Interface("torch._C._create_function_from_graph", "makes a graph callable", _ALL, Risk.BINDING),
    Interface("torch._C.ScriptList", "an argument that the function can empty", "freeing values early", Risk.STABLE),
    Interface("torch._C.parse_schema", "compares the chosen overload with the recorded one", _ALL, Risk.BINDING,
              check=lambda parse: parse("aten::f(Tensor a) -> Tensor").name == "aten::f"),
    Interface("torch._C.parse_ir", "reads a graph from text", _DISK, Risk.BINDING,
              check=lambda parse: parse("graph(%x : Tensor):\n  return (%x)\n", True)),
    Interface("torch._C._jit_tree_views", "syntax trees that stand on the user's lines", _LINES,
              check=lambda views: {"Def", "Decl", "Param", "SourceRangeFactory"} <= set(vars(views))),
    Interface("torch._C._jit_script_compile", "compiles these trees", _LINES, Risk.BINDING),
)
# fmt: on
