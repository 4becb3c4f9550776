"""The buffer: safe to use from two threads at once, and seen by the garbage collector."""

from __future__ import annotations

import gc
import weakref

import torch

from tests.semantics.support import run_script
from torch_ltc.program.spec import make_spec
from torch_ltc.record.buffer import new_buffer


def test_a_cycle_through_a_buffer_is_collected() -> None:
    buffer = new_buffer(make_spec(torch.float32, (2,), (1,)))
    # As a failed job does, whose error has frames that refer to buffers.
    buffer.job = [buffer]  # type: ignore[assignment]
    gone = weakref.ref(buffer)
    del buffer
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_two_threads_set_attributes_of_one_buffer_while_garbage_is_collected() -> None:
    # In a process of its own: what it guards against spoils the memory of the process.
    script = """
        import gc, threading, time
        import torch, torch_ltc
        from torch_ltc.native.recording import native
        from torch_ltc.program.spec import make_spec
        from torch_ltc.record.buffer import _Fields, new_buffer

        NAMES = ("number", "spec", "data", "error", "views", "views_base", "input", "job", "maker", "grown_bytes")
        assert set(_Fields.__annotations__) == {*NAMES, "_identity", "_address", "_address_bytes"}
        if native is not None:
            # The others are no objects in C++.
            NAMES = ("data", "error", "job", "maker")
        spec = make_spec(torch.float32, (2,), (1,))
        gc.disable()

        class Garbage:
            # What is collected may let other threads run, as a tensor does that frees memory of a device.
            def __del__(self):
                state["collecting"] = True
                time.sleep(0.001)

        state = {"collecting": False, "buffer": None, "done": False}

        def set_all():
            while not state["done"]:
                if state["collecting"]:
                    state["collecting"] = False
                    for name in reversed(NAMES):
                        setattr(state["buffer"], name, name)
                time.sleep(0.0001)

        other = threading.Thread(target=set_all)
        other.start()
        many = [new_buffer(spec, 1) for _ in range(50)]
        for number in range(200):
            buffer = state["buffer"] = new_buffer(spec, number)
            # Python keeps dictionaries that were freed; a new one is allocated when these are used up.
            used_up = [{} for _ in range(200)]
            garbage = Garbage()
            garbage.itself = garbage
            del garbage
            gc.set_threshold(1, 1, 1)
            gc.enable()
            # Nothing else is allocated here.
            if native is None:
                buffer.views = buffer.job = buffer.maker = buffer.input = buffer.error = None
            else:
                buffer.job = buffer.maker = buffer.error = None
            gc.disable()
            for name in NAMES:
                setattr(buffer, name, name)
            time.sleep(0.001)
            assert [getattr(buffer, name) for name in NAMES] == list(NAMES)
            many.append(buffer)
        state["done"] = True
        other.join()
        print("right")
    """
    assert run_script(script, timeout_s=120).strip() == "right"
