"""The table: every private interface that the package uses, and everything that it changes in PyTorch.

Entries of backends are in the `private.py` of each. A line reads: the path, what it is used for, what breaks without
it, what could change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.pytorch.entries import Interface, Patch, Registration, Risk, table, takes
from torch_ltc.pytorch.headers import Header
from torch_ltc.pytorch.switches import GETTERS, SETTERS
from torch_ltc.pytorch.versions import OLDEST

__all__ = ["compatibility_table", "interface_table", "table"]

_EXPERIMENTAL, _BINDING, _STABLE, _CALLERS = Risk.EXPERIMENTAL, Risk.BINDING, Risk.STABLE, Risk.CALLERS
_is_class, _is_descriptor = inspect.isclass, inspect.isdatadescriptor


def _exists(found: object) -> bool:
    return True


def _changes_with_writes(version: Callable[[dict[str, Any]], int]) -> bool:
    """True when the version of a module's attributes changes with each kind of write, and with nothing else."""
    module = torch.nn.Module()
    seen = [version(vars(module)), version(vars(module))]
    module.training = False
    seen.append(version(vars(module)))
    vars(module)["other"] = 1
    seen.append(version(vars(module)))
    del module.other
    seen.append(version(vars(module)))
    return seen[0] == seen[1] and len(set(seen)) == len(seen) - 1


# fmt: off
# ---- private interfaces: the device -------------------------------------------------------------------------------
table.add(
    Interface("torch._C._acc.create_empty_tensor", "makes a tensor of the device", "the device", _EXPERIMENTAL),
    Interface("torch._C._acc.PrivateUse1Hooks", "hooks in Python", "the device", _EXPERIMENTAL, check=_is_class),
    Interface("torch._C._acc.DeviceGuard", "a guard in Python", "the device", _EXPERIMENTAL, check=_is_class),
    Interface("torch._C._acc.register_python_privateuseone_hook", "registers the hooks", "the device", _EXPERIMENTAL),
    Interface("torch._C._acc.register_python_privateuseone_device_guard", "sets the guard", "backward", _EXPERIMENTAL),
    Interface("torch._C._get_privateuse1_backend_name", "finds another owner of the device slot",
              "a clear error when two packages claim the slot", _BINDING, check=lambda name: isinstance(name(), str)),
    Interface("torch._register_device_module", "publishes `torch.ltc`", "`torch.ltc`", _STABLE,
              check=takes("device_type", "module")),
    Interface("torch._C._autograd.DeviceType.PrivateUse1", "the guard's answer to autograd", "backward", check=_exists),
    Interface("torch._C._is_alias_of", "tells whether tensors share a storage", "recording", _BINDING),
    Interface("torch._C._set_throw_on_mutable_data_ptr", "makes data pointers raise", "`data_ptr` refuses", _BINDING),
    Interface("torch._C.Generator", "base of the device's generators", "`torch.Generator(device='ltc')`", _STABLE),
)
# ---- private interfaces: the dispatcher ---------------------------------------------------------------------------
table.add(
    Interface("torch._ops.OpOverload", "the type of an operator overload", "recording", _STABLE, check=_is_class),
    Interface("torch.ops.aten.add.Tensor._schema", "arguments, aliases and results of an overload", "recording",
              _STABLE,
              check=lambda schema: [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]),
    Interface("torch.ops.aten.add.Tensor._overloadname", "an overload's own name", "recording", _STABLE,
              check=lambda name: name == "Tensor"),
    Interface("torch.ops.aten.add.Tensor._op", "calls the operator without looking at Python dispatch",
              "shape rules by meta kernels", _STABLE),
    Interface("torch.ops.aten.add.Tensor._op_dk", "runs the kernel of one dispatch key",
              "composites, foreach", _BINDING),
    Interface("torch.ops.aten.add.Tensor._handle", "redispatches through autograd",
              "derivatives of `linear`, `matmul`",
              _BINDING, check=lambda handle: callable(handle.redispatch_boxed)),
    Interface("torch.ops.aten.add.Tensor._can_decompose", "asks for a composite kernel", "lowering of composites"),
    Interface("torch.ops.aten.add.Tensor.redispatch", "runs a meta kernel on device tensors", "views", _BINDING),
    Interface("torch.ops.aten.add.Tensor.decompose", "runs PyTorch's composition", "recurrent networks on CUDA"),
    Interface("torch.library.Library", "its `m` registers kernels, and takes them out, in C++",
              "kernels; operators of other libraries", check=lambda kind: callable(kind("aten", "IMPL").m.reset)),
    Interface("torch._C.DispatchKey", "names of dispatch keys", "views, composites", _STABLE, check=lambda key: all(
        hasattr(key, n) for n in ("Meta", "PrivateUse1", "AutogradNestedTensor", "CompositeImplicitAutograd",
                                  "CompositeExplicitAutograd"))),
    Interface("torch._C.DispatchKeySet", "sets of dispatch keys", "views, composites", _STABLE),
    Interface("torch._C._set_meta_in_tls_dispatch_include", "runs meta kernels on device tensors", "views", _BINDING),
    Interface("torch._C._dispatch_tls_set_dispatch_key_included", "leaves the meta kernels again", "views", _BINDING),
    *(Interface(f"torch._C._dispatch_tls_{name}", "autograd in a kernel", "attention of jagged tensors", _BINDING)
      for name in ("set_dispatch_key_excluded", "is_dispatch_key_excluded")),
    Interface("torch.nested._internal.sdpa._validate_sdpa_input", "checks arguments", "attention of jagged tensors",
              check=takes("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")),
    Interface("torch.nested._internal.nested_tensor.nested_view_from_values_offsets_lengths",
              "makes a jagged tensor of its values", "attention of jagged tensors",
              check=takes("values", "offsets", "lengths")),
    Interface("torch._C._ExcludeDispatchKeyGuard", "runs operators below autocast, kernels of sparse tensors",
              "autocast, sparse tensors", _BINDING),
    Interface("torch._C._len_torch_function_stack", "counts the user's function modes",
              "modes see views, checkpoints under `ltc run`", _BINDING,
              check=lambda count: isinstance(count(), int)),
    Interface("torch._C._len_torch_dispatch_stack", "counts the user's dispatch modes", "modes see `linear`", _BINDING,
              check=lambda count: isinstance(count(), int)),
    Interface("torch._C._are_functorch_transforms_active", "knows that `torch.func` transforms run",
              "`torch.func` through `group_norm`", _BINDING, check=lambda active: active() is False),
    Interface("torch._C._DisableFuncTorch", "makes calls that no `torch.func` transform sees",
              "attention inside of `torch.func`", _BINDING),
    Interface("torch._C.DisableTorchFunction", "makes calls that no function mode sees", "`ltc run`", _STABLE),
    Interface("torch._C._disabled_torch_function_impl", "hands warnings of kernels to Python before torch 2.15",
              "warnings of kernels", _STABLE),
    Interface("torch._C._is_torch_function_enabled", "knows whether kernels in Python see classes of tensors",
              "programs run in place", _BINDING, check=lambda enabled: enabled() is True),
    Interface("torch._C._get_torch_function_state", "knows whether classes of tensors see calls",
              "kernels in Python on classes of tensors", _BINDING),
    Interface("torch._C._set_torch_function_state", "lets classes of tensors see the calls of kernels",
              "kernels in Python on classes of tensors", _BINDING),
    Interface("torch._C._AutoDispatchBelowAutograd", "runs programs without autograd", "running programs", _STABLE),
    Interface("torch._C._jit_get_all_schemas", "lists all overloads", "kernels for the device", _BINDING),
    Interface("torch._C._dispatch_get_registrations_for_dispatch_key", "lists the operators of a layout",
              "sparse tensors", _BINDING),
    Interface("torch._C._dispatch_has_kernel", "leaves out overloads without kernels", "kernels for the device",
              _BINDING,
              check=lambda has: has("aten::add.Tensor") and not has("aten::never")),
    Interface("torch._C._dispatch_has_kernel_for_dispatch_key", "tells composites from kernels", "kernels, foreach",
              _BINDING,
              check=lambda has: has("aten::add.Tensor", "CPU") and not has("aten::add.Tensor",
                 "CompositeImplicitAutograd")),
    Interface("torch._C.Argument", "the type of a schema's argument", "type annotations", _STABLE),
    Interface("torch._dispatch.python.enable_python_dispatcher", "runs Python meta kernels", "functional programs"),
    Interface("torch.utils._python_dispatch.TorchDispatchMode", "sees every call that a composite makes",
              "functional programs", _STABLE, check=_is_class),
)
# ---- private interfaces: tensors ----------------------------------------------------------------------------------
table.add(
    Interface("torch._C.TensorBase", "methods as C++ has them, below those of `torch.Tensor`", "recording", _STABLE,
              check=lambda base: all(hasattr(base, n) for n in ("as_strided", "data", "data_ptr", "untyped_storage",
                 "is_cuda"))),
    Interface("torch._C.TensorBase.as_strided", "makes an alias of a device tensor", "views", _STABLE),
    Interface("torch._C.TensorBase.untyped_storage", "finds a tensor's buffer", "recording", _STABLE),
    Interface("torch._C.TensorBase.data", "changes what a tensor looks at", "in-place views, `resize_`", _STABLE,
              check=_is_descriptor),
    Interface("torch.Tensor._version", "sees that a tensor was written to", "`async_item` of a tensor that changes",
              _STABLE,
              check=_is_descriptor),
    Interface("torch.UntypedStorage._cdata", "identifies a storage", "aliases in fallbacks and checks", _STABLE,
              check=_is_descriptor),
    Interface("torch._C._storage_Use_Count", "finds aliases of parameters and gradients", "`ltc run`, `jit`", _BINDING),
    *(Interface(f"torch.optim.Optimizer.{name}", "finds hooks of an optimizer", "`GradScaler`", _STABLE, check=_exists)
      for name in ("register_step_pre_hook", "register_step_post_hook")),
    Interface("torch._C._set_grad_enabled", "sets grad mode without an object", "short replays run here", _BINDING),
    *(Interface(name, "sees modes and transforms of a thread", "short replays run here", _BINDING) for name in (
        "torch._C._is_any_autocast_enabled", "torch._C._functorch.peek_interpreter_stack")),
    Interface("torch._C.TensorBase.grad", "reads gradients", "`jit`", _STABLE, check=_is_descriptor),
    Interface("torch._foreach_add_", "counts the steps of optimizers", "`jit`", _STABLE),
    Interface("torch._C._dynamo.guards.dict_version", "sees that a dict was written to", "`jit`", _BINDING,
              check=_changes_with_writes),
    Interface("torch._C._dynamo.guards.TensorGuards", "compares the shapes of many tensors at once", "`jit`", _BINDING,
              check=lambda kind: kind(torch.ones(2), dynamic_dims_sizes=[[2]], dynamic_dims_strides=[[1]]).check(
                  torch.zeros(2))),
    *(Interface(f"torch.Tensor.{name}", "finds hooks of a parameter", "`ltc run`", _STABLE, check=_is_descriptor)
      for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    Interface("torch.multiprocessing.reductions.reduce_tensor", "sends tensors of other devices to another process",
              "tensors on queues", _STABLE),
    Interface("torch.TypedStorage", "its `_untyped_storage` is the storage below", "pickling typed storages", _STABLE,
              check=lambda kind: kind(1, dtype=torch.uint8, _internal=True)._untyped_storage.nbytes() == 1),
    Interface("torch._conj", "sets the conjugate bit", "complex views", _STABLE),
    Interface("torch._neg_view", "sets the negative bit", "complex views", _STABLE),
    Interface("torch._to_functional_tensor", "wraps for functionalization", "functional programs"),
    Interface("torch._from_functional_tensor", "unwraps after functionalization", "functional programs"),
    Interface("torch._sync", "brings a functional tensor up to date", "functional programs"),
    Interface("torch._enable_functionalization", "turns functionalization on", "functional programs"),
    Interface("torch._disable_functionalization", "turns functionalization off", "functional programs"),
    Interface("torch._fused_sdp_choice", "asks which attention kernel eager takes", "bits of attention", _BINDING),
    Interface("torch._subclasses.fake_tensor.FakeTensorMode", "shapes", "functional programs", check=_is_class),
    Interface("torch._decomp.core_aten_decompositions", "the table of decompositions", "functional programs"),
    Interface("torch._decomp.decompositions.pw_cast_for_opmath", "rounding of `addmm`, `addmv`", "functional programs"),
    Interface("torch._decomp.get_decompositions", "decompositions of chosen operators", "functional programs"),
    Interface("torch._dynamo.source.ConstantSource", "where a symbol comes from", "symbolic sizes", check=_is_class),
    Interface("torch.utils._sympy.printers.PythonPrinter", "expressions as text", "symbolic sizes", check=_is_class),
    Interface("torch.fx.experimental.symbolic_shapes.ShapeEnv", "symbols and guards", "symbolic sizes", _EXPERIMENTAL,
              check=lambda kind: {"create_symbol", "create_symintnode"} <= set(vars(kind))),
    Interface("torch.fx.experimental.symbolic_shapes.DimDynamic", "a size that varies", "symbolic sizes", _EXPERIMENTAL,
              check=lambda kind: hasattr(kind, "DYNAMIC")),
    Interface("torch._inductor.aoti_compile_and_package", "compiles an exported program", "`export_program` to a file",
              check=takes("exported_program")),
    Interface("torch._dynamo.backends.common.aot_autograd", "graphs of forward and backward",
              "`torch.compile(backend='ltc')`", check=_exists),
    Interface("torch._dynamo.trace_rules.check_file", "Dynamo rewrites no code of this package",
              "`torch.compile` of a whole step", check=takes("filename", "is_inlined_call")),
    Interface("torch._dynamo.trace_rules.SkipResult", "the answer of the same", "`torch.compile` of a whole step",
              check=_is_class),
    *(Interface(f"torch._dynamo.{name}", "what `torch.get_autocast_dtype` returns is a constant to Dynamo",
                "compiled code in autocast", check=_exists) for name in (
        "trace_rules.torch_name_rule_map", "trace_rules.get_torch_obj_rule_map.cache_clear",
        "variables.torch.constant_fold_functions", "variables.torch.TorchInGraphFunctionVariable")),
    *(Interface(f"torch._higher_order_ops.flex_attention.{name}", why, "`flex_attention`") for name, why in (
        ("flex_attention", "the operator that takes functions"),
        ("flex_attention_backward", "its backward"),
        ("flex_attention_autograd", "its kernel for autograd"),
        ("math_attention", "its eager form"),
        ("sdpa_dense", "its eager form, laid out as the query"),
        ("sdpa_dense_backward", "the eager form of its backward"),
        ("create_fw_bw_graph", "traces the gradient of a function of scores"))),
    Interface("torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex",
              "indexing by tensors in functions of scores", "`flex_attention` with captured tensors", check=_is_class),
    *(Interface(f"torch._ops.{name}", "operators that take functions pass over autocast",
                "`torch.cond` under autocast", check=_exists) for name in (
        "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", "_higher_order_ops")),
    Interface("torch._sym_sqrt", "`math.sqrt` of a symbolic number, and others so named", "symbolic sizes"),
)
# ---- private interfaces: autograd, modules, modes, testing --------------------------------------------------------
table.add(
    Interface("torch._C._current_graph_task_id", "knows that backward runs",
              "lines of backward, `no_sync` in backward", _BINDING,
              check=lambda task: task() < 0),
    Interface("torch._C._current_autograd_node", "the node that backward runs", "forward lines of backward calls",
              _BINDING,
              check=lambda node: node() is None),
    Interface("torch._C._autograd._get_sequence_nr", "numbers autograd nodes", "forward lines of backward calls",
              _BINDING,
              check=lambda number: isinstance(number(), int)),
    Interface("torch._C._is_multithreading_enabled", "whether backward may use a thread for each device",
              "backward on the calling thread", _BINDING,
              check=lambda enabled: isinstance(enabled(), bool)),
    Interface("torch._C._set_multithreading_enabled", "has backward use the calling thread alone",
              "backward on the calling thread", _BINDING),
    Interface("torch.autograd.graph.Node._sequence_nr", "a node's number", "forward lines of backward calls"),
    Interface("torch.autograd.forward_ad._current_level", "knows that forward mode is on",
              "forward mode through `linear`",
              check=lambda level: level < 0),
    Interface("torch.nn.Module._wrapped_call_impl", "recognised on the stack", "module paths in listings",
              check=lambda call: call.__code__),
    Interface("torch.autograd.profiler._is_profiler_enabled", "skips ranges while nobody profiles",
              "ranges in profiles",
              check=lambda on: on in (True, False)),
    Interface("torch._C._profiler._RecordFunctionFast", "a range unseen by modes", "ranges in profiles", _BINDING),
    Interface("torch._C._profiler._ExperimentalConfig", "sees all threads", "`torch_ltc.debug.profile`", _EXPERIMENTAL),
    *(Interface(getter, "a switch that kernels depend on", "disk cache keys", _STABLE) for getter in GETTERS),
    Interface("torch._C._get_sdp_priority_order", "a switch of attention", "the choice of its kernel", _STABLE),
    Interface("torch._C._get_overrideable_sdp_enabled", "a switch of attention", "the choice of its kernel", _STABLE),
    Interface("torch.utils._pytree", "opens lists and dicts", "`to_cpu`, fallbacks, replay", _STABLE,
              check=lambda tree: tree.tree_flatten([1, {"a": 2}])[0] == [1, 2]),
    Interface("torch.utils._device._device_constructors", "lists the functions that take a device",
              "`ltc run`",
              check=lambda constructors: len(constructors()) > 9),
    Interface("torch.testing._comparison.default_tolerances", "tolerance of a comparison", "validation"),
    Interface("torch.testing._internal.common_methods_invocations.op_db", "every operator with samples",
              "`ltc conformance`, `make ops`", check=_exists),
    Interface("torch.testing._internal.common_modules.module_db", "every module with samples", "`make ops`",
              check=_exists),
)

# ---- private interfaces: torch.distributed ------------------------------------------------------------------------
_GROUPS = "`torch.distributed` on the device"
table.add(
    *(Interface(f"torch._C._distributed_c10d.{name}", why, _GROUPS, _BINDING, check=check) for name, why, check in (
        ("ProcessGroup", "groups of the physical device", lambda kind: all(hasattr(kind, name) for name in (
            "boxed", "unbox", "_get_backend", "_register_backend", "_set_default_backend", "_device_types"))),
        ("Work", "handles of collectives", lambda kind: hasattr(kind, "boxed") and hasattr(kind, "unbox")),
        ("ReduceOp", "kinds of reductions", lambda kind: int(kind.RedOpType.PREMUL_SUM) > 0),
        ("_create_work_from_future", "handles of recorded collectives", callable))),
    Interface("torch.distributed.Backend.register_backend", "the backend's name", _GROUPS, _EXPERIMENTAL),
    *(Interface(f"torch.ops.c10d.{name}.default", "runs a collective of the physical device", _GROUPS, _BINDING)
      for name in ("allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_", "send",
                   "recv_", "barrier")),
)

# ---- registrations ------------------------------------------------------------------------------------------------
DEVICE_NAME = "the PrivateUse1 device is named `ltc`, with hooks and a guard; `torch.ltc`; methods as `Tensor.is_ltc`"
OPTIMIZER_HOOK = "a hook after every `optimizer.step()`"
DISTRIBUTED_BACKEND = "the backend `ltc` of `torch.distributed`, and kernels of the operators `c10d::*`"
PROCESS_TRANSFER = "reducers of `torch.Tensor` and `torch.nn.Parameter` in `multiprocessing.reduction.ForkingPickler`"
SCALER_HOOK = "a hook before every `optimizer.step()`"
TRACING = "a rule of Dynamo: it rewrites no code of this package"
FLEX_ATTENTION = "kernels of the operator behind `flex_attention`"
AUTOCAST_KERNELS = "kernels of `AutocastPrivateUse1`, and a fallthrough for all other operators"
PIN_MEMORY = "the CPU kernel of `aten::_pin_memory`"
COMPOSITE_GRADIENTS = "kernels of `aten::linear_backward`, `aten::matmul_backward` on all devices"
table.add(
    Registration(DEVICE_NAME, "the device; only one package per process can have the slot, and PyTorch takes its owner "
                 "for the accelerator", "the device", _EXPERIMENTAL, reversible=False),
    Registration(DISTRIBUTED_BACKEND, "collectives are recorded", "`torch.distributed` on the device", _EXPERIMENTAL,
                 reversible=False),
    Registration(OPTIMIZER_HOOK, "the sync; `settings.sync_after_optimizer = False` turns it off", "a step has no end"),
    Registration(PROCESS_TRANSFER, "tensors of the device travel as copies on the CPU; others as they did",
                 "tensors of the device on queues, in workers of a DataLoader"),
    Registration(SCALER_HOOK, "counts of a step that `GradScaler` left out are put right", "`GradScaler` with Adam"),
    Registration(TRACING, "recording and syncs would be traced half-way", "`torch.compile` of a whole step",
                 reversible=False),
    Registration(FLEX_ATTENTION, "it is one recorded call", "it is recorded call by call, and fails under autocast"),
    Registration(AUTOCAST_KERNELS, "the lists of the physical device", "`torch.autocast('ltc')`"),
    Registration(PIN_MEMORY, "`pin_memory=True` while `ltc` is the accelerator", "pinned batches", _CALLERS),
    Registration(COMPOSITE_GRADIENTS, "PyTorch has none: programs with composite `linear` need them",
                 "backward of `linear`"),
)

# ---- patches ------------------------------------------------------------------------------------------------------
_COPY = "the value number must not travel with a copy"
_CAPSULE = "hands out a copy on the physical device instead of a null pointer"
_STORAGE = "copying, saving, pickling, comparing storages of the device"
_PICKLE = "tensors that share memory share it after pickle, too"
_ADDRESS = "goes through the buffer where PyTorch would read memory, or read byte by byte"
_REFUSED = "refuses what needs memory that a storage of the device does not have"
_ARCHIVE = "gives storages of the device their size while they are serialized or loaded"
_ACCELERATOR = "its C++ side expects a caching allocator"
_SWITCH = "what was recorded before runs with the old value ([switches](switches.md))"
_BACKWARD = (
    "runs the pass on the calling thread; raises an error that left a hook, which the device's guard has put aside; "
    "explains a failure on a GPU"
)
table.add(
    Patch("torch.Tensor.data",
          "assigning it changes what a tensor looks at ([0002](decisions/0002-state-on-the-storage.md))",
          "a tensor reads its old value", _STABLE, check=_is_descriptor),
    Patch("torch.Tensor.__deepcopy__", _COPY, "a copy reads another value", _STABLE, check=takes("self", "memo")),
    *(Patch(f"torch.Tensor.{name}", "counts hooks of leaves, which a replay would not run", "`jit` leaves hooks out",
            _STABLE, check=takes("self", "hook")) for name in ("register_hook", "register_post_accumulate_grad_hook")),
    Patch("torch._utils._get_obj_state", _COPY, "a loaded tensor reads another value", check=takes("obj")),
    Patch("torch.Tensor.data_ptr", "a number that tells which tensors share memory, and where; no address",
          "saving of shared tensors", _STABLE, python_only=True),
    *(Patch(f"torch._C.{name}", "looks at the physical memory, after a sync", "tests of `torch._lazy_clone`", _CALLERS)
      for name in ("_is_cow_tensor", "_data_address")),
    Patch("torch.Tensor.__dlpack__", _CAPSULE, "libraries crash", _STABLE),
    Patch("torch.Tensor.__dlpack_device__", _CAPSULE, "`numpy.from_dlpack`", _STABLE, check=takes("self")),
    *(Patch(path, "gives the tensor itself, which takes part in the protocol", "`torch.from_dlpack`", risk)
      for path, risk in (("torch.utils.dlpack.to_dlpack", _STABLE), ("torch.to_dlpack", _STABLE),
                         ("torch._C._to_dlpack", _BINDING), ("torch._C._to_dlpack_versioned", _BINDING))),
    *(Patch(path, "a tensor of the device stays on it", "`torch.from_dlpack`", _STABLE, check=takes("ext_tensor"))
      for path in ("torch.utils.dlpack.from_dlpack", "torch.from_dlpack")),
    Patch("torch._tensor_str._tensor_str", "printing reads once", "many syncs a print", check=takes("self", "indent")),
    *(Patch(f"torch.UntypedStorage.{name}", _STORAGE, "`torch.save`, pickle, `copy.deepcopy`", _CALLERS,
            python_only=True) for name in (
        "nbytes", "__len__", "cpu", "clone", "tolist", "data_ptr", "to", "copy_", "__new__")),
    Patch("torch.UntypedStorage.__getitem__", _STORAGE, "parts of storages", _CALLERS),
    *(Patch(f"torch.UntypedStorage.{name}", _ADDRESS, "`torch.save`, printing", _CALLERS) for name in (
        "__repr__", "_write_file", "_set_from_file")),
    Patch("torch.UntypedStorage.__reduce__", _PICKLE, "pickle", _CALLERS),
    Patch("torch.TypedStorage._get_legacy_storage_class", "answers with the class of the CPU",
          "`tensor.storage_type()`", _CALLERS, check=takes("self")),
    Patch("torch.TypedStorage.__reduce__", _PICKLE, "pickling typed storages", _CALLERS),
    *(Patch(f"torch.UntypedStorage.{name}", _REFUSED, "a crash instead of an error", _CALLERS) for name in (
        "fill_", "resize_", "share_memory_", "__setitem__", "byteswap", "_share_fd_cpu_",
        "_share_filename_cpu_")),
    *(Patch(f"torch._C.{name}", _ARCHIVE, "TorchScript archives have no weights", _CALLERS,
            python_only=True) for name in (
        "ScriptModule.save", "ScriptModule.save_to_buffer", "ScriptModule._save_for_mobile",
        "ScriptModule._save_to_buffer_for_mobile", "ScriptFunction.save", "ScriptFunction.save_to_buffer",
        "ScriptModuleSerializer.serialize", "import_ir_module", "import_ir_module_from_buffer",
        "_import_ir_module_from_package", "_save_jit_module", "_save_jit_module_to_bytes")),
    Patch("torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions._adjust",
          "chooses its partial sums for the physical device", "`linear_cross_entropy`", since=(2, 13)),
    Patch("torch._C._select_conv_backend", "answers for the physical device", "tests of convolutions", _BINDING),
    Patch("torch.Generator", "`torch.Generator(device='ltc')`; `isinstance` holds for all generators",
          "generators of the device",
          _CALLERS, check=_is_class, python_only=True),
    *(Patch(f"torch.accelerator.{name}", _ACCELERATOR, "`torch.accelerator` raises",
          _CALLERS, optional=True) for name in (
        "get_device_capability", "empty_cache", "empty_host_cache", "get_memory_info", "max_memory_allocated",
        "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats", "reset_accumulated_memory_stats",
        "reset_peak_memory_stats", "synchronize", "set_stream",
        # From 2.14 on.
        "random.get_rng_state", "random.get_rng_state_all", "random.initial_seed")),
    *(Patch(path, _SWITCH, "values by the new one", _CALLERS, optional=True) for path in (
        "torch.set_default_dtype", "torch.set_default_tensor_type", "torch.set_num_threads",
        "torch.set_flush_denormal", "torch.backends.ContextProp.__set__", *SETTERS)),
    Patch("torch.amp.GradScaler._maybe_opt_step", "decides in the program whether a step counts", "a sync a step",
          check=takes("self", "optimizer", "optimizer_state")),
    Patch("torch.clear_autocast_cache", "forgets cast parameters of the device too", "old values of parameters"),
    *(Patch(f"torch.{name}", "chosen as on the physical device until it is set", "float16 on the CPU") for name in (
        "get_autocast_dtype", "set_autocast_dtype")),
    Patch("torch._TorchCompileInductorWrapper.__call__", "the graph of code on the device is recorded, not compiled",
          "`torch.compile` on the device", check=takes("self", "model_", "inputs_")),
    *(Patch(f"{module}.destroy_process_group", "runs what was recorded, and lets go of the physical group",
            "pending collectives fail", _CALLERS, check=takes("group")) for module in (
        "torch.distributed", "torch.distributed.distributed_c10d")),
    Patch("torch.nn.parallel.DistributedDataParallel.__init__", "refuses what the reducer needs pinned memory for",
          "a failure in backward", _CALLERS, check=takes("self", "module"), python_only=True),
    Patch("torch.nn.SyncBatchNorm.forward", "says that its kernels are for GPUs alone", "an error of the dispatcher",
          _CALLERS, check=takes("self", "input")),
    Patch("torch.nn.attention.flex_attention._validate_device", "the device is not on its list", "`flex_attention`",
          check=takes("query", "key", "value")),
    Patch("torch.nested._internal.ops.jagged_scaled_dot_product_attention",
          "one recorded call, where PyTorch goes by way of strided nested tensors", "attention of jagged tensors",
          check=takes("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")),
    Patch("torch.autograd.graph._engine_run_backward", _BACKWARD, "an error in a hook ends the process"),
    Patch("torch.autograd._engine_run_backward", _BACKWARD, "an error in a hook ends the process"),
)
# fmt: on


def compatibility_table() -> str:
    """All changes of the package in PyTorch, as a Markdown table; a backend's once the backend is loaded."""
    lines = ["| changed | why | without it |", "|---|---|---|"]
    for registration in table.entries(Registration):
        lasting = "" if registration.reversible else " (for good)"
        lines.append(f"| {registration.path}{lasting} | {registration.why} | {registration.without} |")
    rows: dict[str, list[Patch]] = {}
    for patch in table.entries(Patch):
        words = "; not with the [extension in C++](command_line.md#the-extension-in-c)" if patch.python_only else ""
        rows.setdefault(patch.why + words, []).append(patch)
    for why, patches in rows.items():
        without = ", ".join(dict.fromkeys(patch.without for patch in patches))
        lines.append(f"| {_names(patches)} | {why} | {without} |")
    return "\n".join(lines) + "\n"


def interface_table() -> str:
    """All private interfaces that the package uses, as a Markdown table; a backend's once the backend is loaded."""
    lines = ["| interface | versions | why | without it breaks | risk |", "|---|---|---|---|---|"]
    for entry in (*table.entries(Interface), *table.entries(Header)):
        last = "" if entry.until is None else ".".join(map(str, entry.until))
        versions = f"{'.'.join(map(str, entry.since))} to {last}" if last else f"{'.'.join(map(str, entry.since))} on"
        lines.append(f"| `{entry.path}` | {versions} | {entry.why} | {entry.without} | {entry.risk.name.lower()} |")
    return "\n".join(lines) + "\n"


def _names(patches: list[Patch]) -> str:
    """The paths, an owner's once."""
    by_owner: dict[str, list[str]] = {}
    for patch in patches:
        owner, _, name = patch.path.rpartition(".")
        since = f" (torch {'.'.join(map(str, patch.since))})" if patch.since > OLDEST else ""
        names = by_owner.setdefault(owner, [])
        names.append(f"`{name if names else patch.path}`{since}")
    return ", ".join(name for names in by_owner.values() for name in names)
