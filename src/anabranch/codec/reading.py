"""The compiler of readers: a (class, version) becomes one Python function without nested calls.

`read(view, position, left) -> (object, position, left)`, where `left` is how many array elements the message may still
have. Fixed-width neighbours, the length of what follows them and the count of tags are unpacked in one call. A length
is compared with the bytes that are left before anything is made of it. Strings of requests and responses are bounded
(`STRING_SIZE_MAX`); those of a log's records are read as they were written. Whatever the bytes are, the function ends
with an object or with one of `MALFORMED`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from anabranch.base.errors import DecodeError
from anabranch.codec import primitives
from anabranch.codec.declaration import schema_of
from anabranch.codec.source import Source, size_min
from anabranch.codec.types import Array, Bytes, Field, Fixed, Nested, String, Type, Uuid

MALFORMED = (struct.error, IndexError, UnicodeDecodeError)
"""The exceptions of a reader beside `DecodeError`: the buffer ended, or text was not UTF-8."""

Reader = Callable[[memoryview, int, int], tuple[Any, int, int]]


def compile_reader(declared: type, version: int) -> Reader:
    """Make the reader of one version of a message."""
    schema = schema_of(declared)
    compiler = _ReaderCompiler(version, version in schema.flexible, of_peer=schema.api_key is not None)
    source: Reader = compiler.function(declared)
    return source


class _ReaderCompiler:
    def __init__(self, version: int, flexible: bool, *, of_peer: bool) -> None:
        self.version = version
        self.flexible = flexible
        self.of_peer = of_peer
        self.namespace: dict[str, Any] = {
            "new": object.__new__,
            "uvarint_rest": primitives.uvarint_rest,
            "read_uvarint": primitives.read_uvarint,
            "read_tags": primitives.read_tags,
            "keep_tag": primitives.keep_tag,
            "check_tag_count": primitives.check_tag_count,
            "check_string_size": primitives.check_string_size,
            "refuse": primitives.refuse,
            "too_many": primitives.too_many,
            "uuid_of": primitives.uuid_of,
            "unpack_from": struct.unpack_from,
            "DecodeError": DecodeError,
        }
        self.source = Source(self.namespace)
        self.after_run: list[str] = []

    def function(self, declared: type) -> Any:
        """Compile the reader of `declared` itself."""
        name = f"read_{declared.__name__}_v{self.version}"
        with self.source.block(f"def {name}(view, position, left):"):
            self.source.emit("end = len(view)")
            made = self.struct(declared)
            self.flush()
            self.source.emit(f"return {made}, position, left")
        return self.source.compiled(name)

    def struct(self, declared: type) -> str:
        """Emit the reading of one struct; returns the name of the object, which is complete after the next flush."""
        schema = schema_of(declared)
        made = self.source.name("o")
        self.source.emit(f"{made} = new({self.source.constant('C', declared)})")
        tagged: dict[str, Field] = {}
        for name, field in schema.fields.items():
            if not field.exists(self.version, self.flexible):
                self.source.emit(f"{made}.{name} = {self.default(field)}")
            elif field.tag is not None:
                tagged[name] = field
            else:
                self.value(field.type, f"{made}.{name}", self.version in field.nullable, f"{schema.name}.{name}")
        if self.flexible:
            self.tags(declared, made, tagged)
        else:
            self.source.emit(f"{made}.unknown_tags = None")
        return made

    def tags(self, declared: type, made: str, tagged: dict[str, Field]) -> None:
        """Emit the reading of the tagged fields at a struct's end; most have none, and that is one byte."""
        counted = self.source.name("t")
        self.source.run.append((counted, "B"))
        self.flush()
        with self.source.block(f"if {counted}:"):
            if tagged:
                targets = "".join(f"{made}.{name}, " for name in tagged)
                reader = self.tag_reader(declared, tagged)
                self.source.emit(
                    f"{targets}{made}.unknown_tags, position, left = {reader}(view, position, {counted}, left)"
                )
            else:
                self.source.emit(f"{made}.unknown_tags, position, left = read_tags(view, position, {counted}, left)")
        with self.source.block("else:"):
            for name, field in tagged.items():
                self.source.emit(f"{made}.{name} = {self.default(field)}")
            self.source.emit(f"{made}.unknown_tags = None")

    def tag_reader(self, declared: type, tagged: dict[str, Field]) -> str:
        """Compile the function that reads the tagged fields of one struct; returns its name."""
        name = f"read_{declared.__name__}_tags"
        if name in self.namespace:
            return name
        inner = _ReaderCompiler(self.version, self.flexible, of_peer=self.of_peer)
        source = inner.source
        with source.block(f"def {name}(view, position, count, left):"):
            source.emit("end = len(view)")
            source.emit("if count > 127: count, position = uvarint_rest(view, position, count)")
            source.emit("left -= count")
            source.emit("if left < 0: raise too_many('tagged fields')")
            source.emit("unknown = {}")
            for each, field in tagged.items():
                source.emit(f"v_{each} = {self.default_in(inner, field)}")
            source.emit("seen = set()")
            with source.block("for _ in range(check_tag_count(count)):"):
                source.emit("tag, position = read_uvarint(view, position)")
                source.emit("size, position = read_uvarint(view, position)")
                source.emit("stop_tag = position + size")
                source.emit("if stop_tag > end: raise refuse(f'tagged field {tag}', size, end - position)")
                source.emit("if tag in seen: raise DecodeError(f'tagged field {tag} appears twice')")
                source.emit("seen.add(tag)")
                word = "if"
                for each, field in tagged.items():
                    with source.block(f"{word} tag == {field.tag}:"):
                        what = f"{declared.__name__}.{each}"
                        inner.value(field.type, f"v_{each}", self.version in field.nullable, what)
                        inner.flush()
                        source.emit(
                            f"if position != stop_tag: raise DecodeError('{what}: not as long as its tag says')"
                        )
                    word = "elif"
                with source.block("else:"):
                    source.emit("keep_tag(unknown, tag, view, position, size)")
                    source.emit("position = stop_tag")
            values = "".join(f"v_{each}, " for each in tagged)
            source.emit(f"return {values}unknown or None, position, left")
        self.namespace[name] = source.compiled(name)
        return name

    def value(self, kind: Type, target: str, nullable: bool, what: str) -> None:
        """Emit the reading of one value into `target`."""
        match kind:
            case Fixed(code=code):
                self.source.run.append((target, code))
            case Uuid():
                raw = self.source.name("u")
                self.source.run.append((raw, "16s"))
                self.after_run.append(f"{target} = uuid_of({raw})")
            case String():
                self.string(target, nullable, what)
            case Bytes():
                self.span(target, nullable, what, self.length("i"), "view[position:stop]")
            case Array(of=element):
                self.array(element, target, nullable, what)
            case Nested(of=inner) if nullable:
                self.nullable_struct(inner, target)
            case Nested(of=inner):
                self.source.emit(f"{target} = {self.struct(inner)}")

    def length(self, code: str, long: str = "") -> str:
        """Emit the reading of a length or count, in flexible versions one more than it is; returns its name.

        `long` is emitted where a length of a flexible version has more than a byte.
        """
        counted = self.source.name("n")
        self.source.run.append((counted, "B" if self.flexible else code))
        self.flush()
        if self.flexible:
            with self.source.block(f"if {counted} > 127:"):
                self.source.emit(f"{counted}, position = uvarint_rest(view, position, {counted})")
                if long:
                    self.source.emit(long.format(counted))
        return counted

    def string(self, target: str, nullable: bool, what: str) -> None:
        """Emit the reading of text. A length of 16 bits bounds it; a varint does not."""
        counted = self.length("h", f"check_string_size({what!r}, {{}} - 1)" if self.of_peer else "")
        self.span(target, nullable, what, counted, "view[position:stop].tobytes().decode()")

    def span(self, target: str, nullable: bool, what: str, counted: str, made: str) -> None:
        """Emit the reading of text or bytes, whose length is read."""
        self.source.emit(f"stop = position + {counted}{' - 1' if self.flexible else ''}")
        null = "stop < position"
        if nullable:
            self.source.emit(f"if {null}: {target} = None")
            self.source.emit(f"elif stop > end: raise refuse({what!r}, stop - position, end - position)")
            with self.source.block("else:"):
                self.source.emit(f"{target} = {made}")
                self.source.emit("position = stop")
        else:
            self.source.emit(f"if {null} or stop > end: raise refuse({what!r}, stop - position, end - position)")
            self.source.emit(f"{target} = {made}")
            self.source.emit("position = stop")

    def array(self, element: Type, target: str, nullable: bool, what: str) -> None:
        """Emit the reading of an array, after measuring its count against the bytes that are left."""
        counted = self.length("i")
        if self.flexible:
            self.source.emit(f"{counted} -= 1")
        if nullable:
            with self.source.block(f"if {counted} < 0:"):
                self.source.emit(f"{target} = None")
            with self.source.block("else:"):
                self.elements(element, target, counted, what, "")
        else:
            self.elements(element, target, counted, what, f"{counted} < 0 or ")

    def elements(self, element: Type, target: str, counted: str, what: str, null: str) -> None:
        smallest = size_min(element, self.version, self.flexible)
        assert smallest, what
        source = self.source
        source.emit(
            f"if {null}{counted} * {smallest} > end - position: raise refuse({what!r}, {counted}, end - position)"
        )
        source.emit(f"left -= {counted}")
        source.emit(f"if left < 0: raise too_many({what!r})")
        match element:
            case Fixed(code=code, size=size):
                source.emit(f"{target} = list(unpack_from(f'>{{{counted}}}{code}', view, position))")
                source.emit(f"position += {counted} * {size}")
            case Nested(of=inner):
                items = source.name("a")
                source.emit(f"{target} = {items} = []")
                with source.block(f"for _ in range({counted}):"):
                    made = self.struct(inner)
                    self.flush()
                    source.emit(f"{items}.append({made})")
            case _:
                items, item = source.name("a"), source.name("i")
                source.emit(f"{target} = {items} = []")
                with source.block(f"for _ in range({counted}):"):
                    self.value(element, item, False, what)
                    self.flush()
                    source.emit(f"{items}.append({item})")

    def nullable_struct(self, inner: type, target: str) -> None:
        present = self.source.name("p")
        self.source.run.append((present, "b"))
        self.flush()
        self.source.emit(f"if {present} < 0: {target} = None")
        with self.source.block("else:"):
            made = self.struct(inner)
            self.flush()
            self.source.emit(f"{target} = {made}")

    def flush(self) -> None:
        """Emit the one call that unpacks the run."""
        run, self.source.run = self.source.run, []
        if not run:
            return
        codes = "".join(code for _, code in run)
        packer = self.source.packer(codes)
        if codes == "B":
            self.source.emit(f"{run[0][0]} = view[position]")
        else:
            unpack = self.source.name("S")
            self.namespace[unpack] = packer.unpack_from
            self.source.emit(f"{', '.join(target for target, _ in run)}, = {unpack}(view, position)")
        self.source.emit(f"position += {packer.size}")
        for line in self.after_run:
            self.source.emit(line)
        self.after_run = []

    def default(self, field: Field) -> str:
        return self.default_in(self, field)

    @staticmethod
    def default_in(compiler: _ReaderCompiler, field: Field) -> str:
        """The expression of a field's default value."""
        default = field.default
        if default == ():
            return "[]"
        if isinstance(default, type):
            return f"{compiler.source.constant('C', default)}()"
        if default is None or isinstance(default, bool | int | str | bytes):
            return repr(default)
        return compiler.source.constant("D", default)
