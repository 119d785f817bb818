"""The compiler of writers: a (class, version) becomes one Python function without nested calls.

`write(message, out, splices)` appends to the bytearray `out`. Records that are not copied leave a mark in `splices`,
(position in `out`, part). A field that the version lacks is left out, whatever its value; a tagged field with its
default value as well. Of a long sentence (a field `error_message`) the middle is left out: it may quote names of
clients, and a reader takes no string above `STRING_SIZE_MAX`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from anabranch.base.errors import shortened
from anabranch.codec import primitives
from anabranch.codec.declaration import schema_of
from anabranch.codec.source import Source
from anabranch.codec.types import Array, Bytes, Field, Fixed, Nested, String, Type, Uuid

Splice = tuple[int, Any]
Writer = Callable[[Any, bytearray, list[Splice]], None]
SENTENCE = "error_message"
"""How the names of the fields end that hold a sentence."""


def compile_writer(declared: type, version: int) -> Writer:
    """Make the writer of one version of a message."""
    schema = schema_of(declared)
    writer: Writer = _WriterCompiler(version, version in schema.flexible).function(declared)
    return writer


class _WriterCompiler:
    def __init__(self, version: int, flexible: bool) -> None:
        self.version = version
        self.flexible = flexible
        self.namespace: dict[str, Any] = {
            "uvarint": primitives.uvarint,
            "write_tags": primitives.write_tags,
            "put_records": primitives.put_records,
            "pack": struct.pack,
            "shortened": shortened,
        }
        self.source = Source(self.namespace)

    def function(self, declared: type) -> Any:
        """Compile the writer of `declared` itself."""
        name = f"write_{declared.__name__}_v{self.version}"
        with self.source.block(f"def {name}(message, out, splices):"):
            self.struct(declared, "message")
            self.flush()
        return self.source.compiled(name)

    def struct(self, declared: type, given: str) -> None:
        """Emit the writing of one struct."""
        tagged: dict[str, Field] = {}
        for name, field in schema_of(declared).fields.items():
            if not field.exists(self.version, self.flexible):
                continue
            if field.tag is not None:
                tagged[name] = field
            else:
                self.value(field.type, f"{given}.{name}", self.version in field.nullable)
        if self.flexible:
            self.tags(declared, given, tagged)

    def tags(self, declared: type, given: str, tagged: dict[str, Field]) -> None:
        said = [f"{given}.unknown_tags"]
        for name, field in tagged.items():
            said.append(self.said(field, f"{given}.{name}"))
        self.flush()
        with self.source.block(f"if {' or '.join(said)}:"):
            if tagged:
                self.source.emit(f"{self.tag_writer(declared, tagged)}({given}, out)")
            else:
                self.source.emit(f"write_tags(out, {given}.unknown_tags)")
        with self.source.block("else:"):
            self.source.emit("out.append(0)")

    def said(self, field: Field, expression: str) -> str:
        """The condition under which a tagged field is written."""
        if field.default is None:
            return f"{expression} is not None"
        if field.default == ():
            return expression if field.nullable.first > self.version else f"({expression} is None or {expression})"
        return f"{expression} != {self.source.constant('D', field.default)}"

    def tag_writer(self, declared: type, tagged: dict[str, Field]) -> str:
        """Compile the function that writes the tagged fields of one struct; returns its name."""
        name = f"write_{declared.__name__}_tags"
        if name in self.namespace:
            return name
        inner = _WriterCompiler(self.version, self.flexible)
        source = inner.source
        with source.block(f"def {name}(given, whole):"):
            source.emit("tags = dict(given.unknown_tags or ())")
            source.emit("splices = None")
            for each, field in tagged.items():
                with source.block(f"if {inner.said(field, f'given.{each}')}:"):
                    source.emit("out = bytearray()")
                    inner.value(field.type, f"given.{each}", self.version in field.nullable)
                    inner.flush()
                    source.emit(f"tags[{field.tag}] = out")
            source.emit("write_tags(whole, tags)")
        self.namespace[name] = source.compiled(name)
        return name

    def value(self, kind: Type, expression: str, nullable: bool) -> None:
        """Emit the writing of one value."""
        match kind:
            case Fixed(code=code):
                self.source.run.append((expression, code))
            case Uuid():
                self.source.run.append((f"{expression}.bytes", "16s"))
            case String():
                text = self.source.name("s")
                given = text if nullable else expression
                encoded = f"shortened({given}).encode()" if expression.endswith(SENTENCE) else f"{given}.encode()"
                if nullable:
                    self.source.emit(f"{text} = {expression}")
                    self.source.emit(f"if {text} is not None: {text} = {encoded}")
                else:
                    self.source.emit(f"{text} = {encoded}")
                self.length(text, nullable, "h")
                self.source.emit(f"if {text}: out += {text}" if nullable else f"out += {text}")
            case Bytes(passes_through=passes_through):
                raw = self.source.name("b")
                self.source.emit(f"{raw} = {expression}")
                self.length(raw, nullable, "i")
                with self.source.block(f"if {raw} is not None:"):
                    self.source.emit(
                        f"put_records(out, splices, {raw}, len({raw}))" if passes_through else f"out += {raw}"
                    )
            case Array(of=element):
                self.array(element, expression, nullable)
            case Nested(of=inner):
                given = self.source.name("m")
                self.source.emit(f"{given} = {expression}")
                if not nullable:
                    self.struct(inner, given)
                    return
                self.flush()
                self.source.emit(f"if {given} is None: out.append(255)")
                with self.source.block("else:"):
                    self.source.emit("out.append(1)")
                    self.struct(inner, given)
                    self.flush()

    def length(self, sized: str, nullable: bool, code: str) -> None:
        """Emit the length or count of `sized` as the last of the run, and flush it."""
        counted = self.source.name("n")
        more, null = (" + 1", "0") if self.flexible else ("", "-1")
        self.source.emit(
            f"{counted} = len({sized}){more}" + (f" if {sized} is not None else {null}" if nullable else "")
        )
        if not self.flexible:
            self.source.run.append((counted, code))
            self.flush()
            return
        run = self.source.run
        with self.source.block(f"if {counted} < 128:"):
            self.source.run = [*run, (counted, "B")]
            self.flush()
        with self.source.block("else:"):
            self.source.run = run
            self.flush()
            self.source.emit(f"out += uvarint({counted})")

    def array(self, element: Type, expression: str, nullable: bool) -> None:
        source = self.source
        items, item = source.name("a"), source.name("i")
        source.emit(f"{items} = {expression}")
        self.length(items, nullable, "i")
        match element:
            case Fixed(code=code):
                source.emit(f"if {items}: out += pack(f'>{{len({items})}}{code}', *{items})")
                return
            case Nested(of=inner):
                with source.block(f"for {item} in {items}{' or ()' if nullable else ''}:"):
                    self.struct(inner, item)
                    self.flush()
            case _:
                with source.block(f"for {item} in {items}{' or ()' if nullable else ''}:"):
                    self.value(element, item, False)
                    self.flush()

    def flush(self) -> None:
        """Emit the one call that packs the run."""
        run, self.source.run = self.source.run, []
        if not run:
            return
        codes = "".join(code for _, code in run)
        if codes == "B":
            self.source.emit(f"out.append({run[0][0]})")
            return
        pack = self.source.name("P")
        self.namespace[pack] = self.source.packer(codes).pack
        self.source.emit(f"out += {pack}({', '.join(expression for expression, _ in run)})")
