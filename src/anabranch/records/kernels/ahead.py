"""A kernel as plain machine code: for processes that load neither Numba nor LLVM (ADR 0042).

The kernel takes and returns a number of 64 bits, calls nothing and has no constants in memory. So its code has no
relocations, and runs wherever it is put. It is compiled for every processor of the architecture, not for this one, but
for the features that the caller names.
"""

from __future__ import annotations

from typing import Any, cast

import llvmlite.binding as llvm
from numba import njit, types
from numba.core import config

_ENTRY = "entry"


class NotPlainError(Exception):
    """The kernel's code refers to something outside of it, or is not in ELF."""


def machine_code(kernel: Any, features: str = "") -> bytes:
    """Compile a kernel that takes one number, in the calling convention of C; the code begins with its entry.

    `features`: of the processor that the code is for, beside those that every one of the architecture has, as LLVM
    names them.
    """
    dispatcher = cast(Any, njit(nogil=True, error_model="numpy")(kernel.py_func))
    numba_config = cast(Any, config)
    vectorizes, numba_config.LOOP_VECTORIZE = numba_config.LOOP_VECTORIZE, 0  # Vectors would need constants in memory.
    try:
        dispatcher.compile((types.int64,))
    finally:
        numba_config.LOOP_VECTORIZE = vectorizes
    (compiled,) = dispatcher.overloads.values()
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    module.link_in(llvm.parse_assembly(_entry_of(compiled.fndesc.llvm_func_name)))
    for function in module.functions:
        if function.name != _ENTRY and not function.is_declaration:
            function.linkage = llvm.Linkage.internal
            function.add_function_attribute("alwaysinline")  # Or the code would begin with it, if it is long.
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu="", features=features, opt=3, reloc="pic", codemodel="small")
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    if any(function.name != _ENTRY and not function.is_declaration for function in module.functions):
        raise NotPlainError("the kernel's code does not begin with its entry")
    return _text_of(machine.emit_object(module))


def _entry_of(name: str) -> str:
    """A function that calls a kernel as C would; Numba's own calls give the result and an error by address."""
    return f"""
        declare i32 @"{name}"(ptr, ptr, i64)
        define i64 @{_ENTRY}(i64 %argument) {{
            %result = alloca i64
            %error = alloca ptr
            call i32 @"{name}"(ptr %result, ptr %error, i64 %argument)
            %value = load i64, ptr %result
            ret i64 %value
        }}
    """


def _text_of(object_file: bytes) -> bytes:
    if not object_file.startswith(b"\x7fELF"):
        raise NotPlainError("machine code is kept for systems with ELF alone")
    sections = llvm.ObjectFileRef.from_data(object_file).sections()
    found = {(section.name() or b"").decode(): bytes(section.data()) for section in sections if section.size()}
    if any(name.startswith((".rela.text", ".rel.text")) for name in found):
        raise NotPlainError("the kernel's code refers to something outside of it")
    return found[".text"]
