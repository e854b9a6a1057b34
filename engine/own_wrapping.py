"""Engines as a user wraps them: with options of the wrapping call, or by a function of the user's own.

See [Note: one spelling] in `engine.names`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel
from shardproof.engine.import_by_name import LoadError, load
from shardproof.engine.names import spelled

_WRAP = "wrap"
# What does not depend on the call that wraps a model.
_OF_ANY_CALL = frozenset(
    {
        Capability.REPLICATE,
        Capability.SHARD,
        Capability.ACCUMULATE,
        Capability.CLIP,
        Capability.COMPLEX,
        Capability.LOSS_SCALE,
        Capability.OWN_BUFFERS,
        Capability.PARAMETER_SHAPES,
        Capability.RANK_DEPENDENT,
        Capability.RANK_DEPENDENT_UNITS,
        Capability.SPARSE_GRADIENTS,
        Capability.SEVERAL_OPTIMIZERS,
        Capability.STATE,
        Capability.UNUSED,
    }
)


# Any: options are any values.
def with_options(engine: Engine, options: Mapping[str, Any]) -> Engine:
    """Return the engine with these options; raises ValueError if it takes no such options."""
    of_call = {name: value for name, value in options.items() if name != _WRAP}
    if _WRAP in options:
        if of_call:
            raise ValueError(
                f"expected options or a function that wraps, got both; call with {of_call} there"
            )
        return _WrappedByUser(engine, str(options[_WRAP]))
    call = type(engine).call
    if call is None:
        raise ValueError("its adapter takes no options; try a function of your own, by --wrap")
    known = inspect.signature(call).parameters
    for name in of_call:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{call.__name__}() has no option {name!r}{hint}")
    decided = frozenset[Capability]().union(*(engine.decided_by.get(name, ()) for name in of_call))
    made = copy(engine)  # a name may be of an object that others use too
    made.call_options, made.capabilities = of_call, engine.capabilities - decided
    return made


class _WrappedByUser(Engine):
    """An engine whose models a user's function wraps, called with the model, and with the mesh if it takes two."""

    def __init__(self, engine: Engine, function: str) -> None:
        if type(engine).adopt is Engine.adopt:
            raise ValueError("its adapter cannot adopt a model that another function wrapped")
        try:
            found: Any = load(function)
        except LoadError as error:
            raise ValueError(str(error)) from error
        if not callable(found):
            raise ValueError(
                f"expected a function that wraps the model, got {function} of {type(found).__name__}"
            )
        self._engine, self._wrap, self._function = engine, found, function
        self.name = spelled(engine.name, {_WRAP: function})
        self.capabilities = engine.capabilities & _OF_ANY_CALL

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap the model by the user's function."""
        plan.refuse_beyond(self.capabilities)
        wrap: Callable[..., object] = self._wrap
        takes_mesh = len(inspect.signature(wrap).parameters) > 1
        wrapped = wrap(model, mesh) if takes_mesh else wrap(model)
        if wrapped is not None and not isinstance(wrapped, nn.Module):
            got = type(wrapped).__name__
            raise TypeError(
                f"{self._function}: expected the wrapped model, or None if it is wrapped in place, got {got}"
            )
        return self._engine.adopt(model if wrapped is None else wrapped, model, plan)

    def version(self) -> str:
        """Return the release of the engine that the function calls."""
        return self._engine.version()
