"""Digests of content: of values, of the code that they call, and of the globals that this code reads.

Definitions of torch, the standard library, installed packages and the harness are hashed by name, because an
installation does not change. Everything else is hashed by its bytecode and its values, so that two definitions with the
same name differ.

[Note: what has no digest] A digest must not be guessed. An object that pickle cannot take apart, such as a C callable
bound to hidden state, has none. Neither has an object that contains one.
"""

from __future__ import annotations

import copyreg
import ctypes
import enum
import functools
import hashlib
import operator
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Packages whose definitions are hashed by name, beside the standard library and installed packages.
_NAMED_PACKAGES = ("torch", "shardproof.harness", "shardproof.engine")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
# Members of a class that do not affect its behaviour, or that are derived from other members.
_UNREAD_MEMBERS = frozenset(
    {
        "__doc__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "__slots__",
        "__module__",
        "__qualname__",
        "__orig_bases__",
        "__parameters__",
        "__abstractmethods__",
        "_abc_impl",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__match_args__",
        "__firstlineno__",
        "__static_attributes__",
        "__protocol_attrs__",
        "__non_callable_proto_members__",
    }
)
# The maximum nesting of containers in a value. Code does not nest, however long its chain of calls is.
_MAX_DEPTH = 150


class _NoDigestError(Exception):
    """A part of a value cannot be taken apart."""


def content_digest(value: object) -> str | None:
    """Return a hash of a value and of all code that it refers to; None where a part of it cannot be read.

    Processes that run the same release of Python agree on it, whatever their hash seed is.
    """
    try:
        return _Digest().of(value)
    except (_NoDigestError, RecursionError):
        return None


class _Digest:
    """A hash under construction. Functions and classes are numbered when they are first met and read at the end."""

    def __init__(self, known: dict[int, int] | None = None) -> None:
        self._hash = hashlib.sha256()
        self._number = dict(known or {})
        self._count = max(self._number.values(), default=-1) + 1
        self._alive: list[object] = []  # so that no two objects share an address
        self._unread: deque[tuple[int, Any]] = deque()  # Any: a function or a class
        self._depth = 0

    def of(self, value: object) -> str:
        """Read a value and then all definitions that it refers to."""
        self._add(value)
        while self._unread:
            number, definition = self._unread.popleft()
            self._emit("definition", str(number))
            if isinstance(definition, type):
                self._add_class(definition)
            else:
                self._add_function(definition)
        return self._hash.hexdigest()

    def _emit(self, *texts: str | bytes) -> None:
        """Write texts so that two different sequences never produce the same bytes."""
        for text in texts:
            data = text.encode() if isinstance(text, str) else text
            self._hash.update(b"%d:" % len(data) + data)

    def _add(self, value: Any) -> None:  # Any: of any type at all
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _NoDigestError(f"more than {_MAX_DEPTH} levels")
        if type(value) in _PLAIN:
            self._emit(type(value).__name__, value if isinstance(value, bytes) else repr(value))
        elif isinstance(value, type | types.FunctionType):
            self._refer(value)
        elif isinstance(value, types.ModuleType):
            self._emit("module", value.__name__)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodType):
            self._add_bound(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, enum.Enum):
            self._refer(type(value))
            self._emit("member", str(value.name))
            if not _is_named(type(value)):
                self._add(value.value)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif type(value) in _READERS:
            self._emit(type(value).__name__)
            _READERS[type(value)](self, value)
        else:
            self._once(value)
        self._depth -= 1

    def _refer(self, definition: Any) -> None:  # Any: a function or a class
        """Write the name of a definition, or the number of its content, which follows later."""
        if _is_named(definition):
            self._emit("name", str(definition.__module__), definition.__qualname__)
        elif id(definition) in self._number:
            self._emit("again", str(self._number[id(definition)]))
        else:
            self._emit("first")
            self._unread.append((self._new_number(definition), definition))

    def _new_number(self, value: object) -> int:
        self._alive.append(value)
        number = self._number[id(value)] = self._count
        self._count += 1
        return number

    def _once(self, value: object) -> None:
        """Read an object by its pickle reduction, and write a reference when it is met again."""
        if id(value) in self._number:
            self._emit("again", str(self._number[id(value)]))
            return
        self._new_number(value)
        self._emit("object")
        self._refer(type(value))
        reduced = _reduced(value)
        if isinstance(reduced, str):
            self._add_global(value, reduced)
        else:
            self._alive.append(reduced)
            build, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
            for part in (build, arguments, state, list(items or ()), list(pairs or ())):
                self._alive.append(part)
                self._add(part)

    def _add_global(self, value: Any, name: str) -> None:  # Any: of any type at all
        """Read an object that pickle knows by name alone: a cached function, a dtype, a type variable."""
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            self._add(wrapped)
        elif _is_named(type(value)):
            self._emit("global", str(getattr(value, "__module__", "")), name)
        else:
            raise _NoDigestError(f"{name} of type {type(value).__qualname__}")

    def _add_bound(self, method: Any) -> None:  # Any: a method, or a function of C
        """Read a method with the object that it is bound to; a C function is hashed by its name."""
        owner = method.__self__
        if isinstance(method, types.MethodType):
            self._emit("method")
            self._add(method.__func__)
        else:
            self._emit("builtin", str(method.__module__), method.__qualname__)
        self._add(owner)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        is_readable = tensor.layout is torch.strided and tensor.device.type != "meta"
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or not is_readable:
            raise _NoDigestError(f"a tensor of type {type(tensor).__qualname__}")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        form = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad, tensor.device.type)
        self._emit(type(tensor).__name__, repr(form), ctypes.string_at(plain.data_ptr(), plain.nbytes))

    def add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(value)
        self._emit("end")

    def add_pairs(self, pairs: Any) -> None:  # Any: a mapping of anything
        """Read keys and values in their order."""
        self.add_all(part for pair in pairs.items() for part in pair)

    def add_members(self, members: Any) -> None:  # Any: a set of anything
        """Read the members of a set in the order of their digests."""
        self._emit(*sorted(_Digest(self._number).of(member) for member in members), "end")

    def add_mutable(self, values: Any) -> None:  # Any: a list or a dictionary, which may contain itself
        """Read a container, and write a reference where it contains itself."""
        if id(values) in self._number:
            self._emit("again", str(self._number[id(values)]))
            return
        self._new_number(values)
        if isinstance(values, dict):
            self.add_pairs(values)
        else:
            self.add_all(values)

    def add_accessors(self, descriptor: Any) -> None:  # Any: a property
        """Read the functions of a property."""
        self.add_all((descriptor.fget, descriptor.fset, descriptor.fdel))

    def add_wrapped(self, descriptor: Any) -> None:  # Any: a static or class method
        """Read the function behind a descriptor."""
        self._add(descriptor.__func__)

    def _add_function(self, function: Any) -> None:  # Any: its closure and globals have no types
        self._emit("function", str(function.__module__), function.__qualname__)
        self._add_code(function.__code__)
        self._add(function.__defaults__)
        self._add(function.__kwdefaults__)
        self._add(dict(vars(function)))
        self.add_all(_contents(function.__closure__ or ()))
        names = sorted(set(_names(function.__code__)))
        for name in names:
            if name in function.__globals__ and name not in {"__doc__", "__file__", "__cached__"}:
                self._add_read(name, function.__globals__[name], names)

    def _add_read(self, name: str, value: Any, names: list[str]) -> None:  # Any: a global
        """Read a global; for a module of ours also the attributes that the function may read."""
        self._emit("global", name)
        self._add(value)
        if isinstance(value, types.ModuleType) and not _is_package_named(value.__name__):
            if id(value) in self._number:
                return
            self._new_number(value)
            for attribute in names:
                if attribute in vars(value):
                    self._add_read(attribute, vars(value)[attribute], names)
            del self._number[id(value)]  # another function may read other attributes

    def _add_code(self, code: types.CodeType) -> None:
        """Read bytecode; its position in a file does not matter."""
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._emit("code", code.co_name, repr(counts), code.co_code, code.co_exceptiontable)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts):
            self._add(names)

    def _add_class(self, kind: Any) -> None:  # Any: members of any type
        self._emit("class", kind.__module__, kind.__qualname__)
        self._add(type(kind))
        self._add(kind.__bases__)
        for name, member in sorted(_members(kind), key=operator.itemgetter(0)):
            self._emit("member", name)
            self._add(member)


# Any: each reader takes the values of its types.
_READERS: dict[type, Any] = {
    tuple: _Digest.add_all,
    list: _Digest.add_mutable,
    dict: _Digest.add_mutable,
    types.MappingProxyType: _Digest.add_pairs,
    set: _Digest.add_members,
    frozenset: _Digest.add_members,
    property: _Digest.add_accessors,
    staticmethod: _Digest.add_wrapped,
    classmethod: _Digest.add_wrapped,
}


# Any: the reduction of an object by pickle.
def _reduced(value: Any) -> Any:
    """Take an object apart as pickle does."""
    if isinstance(value, functools.cached_property):
        return functools.cached_property, (value.func,)
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        return value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception as error:  # any exception means that the object cannot be taken apart
        raise _NoDigestError(f"{type(value).__qualname__}: {error}") from error


# Any: a cell holds anything.
def _contents(cells: Iterable[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield "an empty cell"


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions inside it may read from its globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


# Any: members of any type.
def _members(kind: Any) -> Iterator[tuple[str, Any]]:
    made_by_c = (types.MemberDescriptorType, types.GetSetDescriptorType)
    for name, member in vars(kind).items():
        if name not in _UNREAD_MEMBERS and not isinstance(member, made_by_c):
            yield name, member


def _is_named(definition: Any) -> bool:  # Any: a function or a class
    """Whether a name is enough: not where several functions are created under the same name."""
    module, qualname = definition.__module__, definition.__qualname__
    return isinstance(module, str) and "<" not in qualname and _is_package_named(module)


@cache
def _is_package_named(module: str) -> bool:
    top = module.partition(".")[0]
    if (
        f"{module}.".startswith(tuple(f"{named}." for named in _NAMED_PACKAGES))
        or top in sys.stdlib_module_names
    ):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(Path(file).is_relative_to(folder) for folder in _installed()) if file else top == "builtins"


@cache
def _installed() -> tuple[str, ...]:
    return tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib")})
