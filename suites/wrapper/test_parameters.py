"""use_orig_params, named_parameters and named_buffers: the parameters of the wrapper, and their names."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import SEVERAL
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import UNITS, copies, parameters, tower
from shardproof.suites.wrapper.wrapping import original

# A flat parameter is padded, so that each rank has as much of it: by fewer than this many elements per rank.
_PADDING = 16


@pytest.mark.kills("AlwaysShowsFlatParameters")
@pytest.mark.api("use_orig_params")
@pytest.mark.worlds(SEVERAL)  # for a lone rank the pieces are the parameters
@expects("names", "dims of pieces", "elements on all ranks")
def test_shows_pieces_under_the_old_names(bench: Bench) -> None:
    plain, root = parameters(tower()), bench.wrapped(tower())
    shown = {original(name): p for name, p in root.named_parameters()}
    bench.same("names", list(shown), list(plain))
    bench.same("dims of pieces", {p.dim() for p in shown.values()}, {1})
    sizes = bench.summed([p.numel() for p in shown.values()])
    bench.same("elements on all ranks", sizes, [p.numel() for p in plain.values()])


@pytest.mark.kills("AlwaysShowsNames")
@pytest.mark.api("use_orig_params", "FlatParameter")
@pytest.mark.worlds(SEVERAL)  # for a lone rank the pieces are the parameters
@expects("number of flat parameters", "what is not flat", "elements of all ranks beyond the padding")
def test_shows_one_flat_parameter_for_each_unit(bench: Bench) -> None:
    numels = [15, 20, 26]  # of the middle's first layer, of its second, and of the root
    shown = list(bench.wrapped(tower(), use_orig_params=False).parameters())
    bench.same("number of flat parameters", len(shown), len(numels))
    is_flat = [isinstance(p, bench.names.FlatParameter) and p.dim() == 1 for p in shown]
    bench.same("what is not flat", is_flat.count(False), 0)
    sizes = bench.summed(sorted(p.numel() for p in shown))
    beyond = [size - numel for size, numel in zip(sizes, numels, strict=False)]
    beyond = [padding for padding in beyond if not 0 <= padding < _PADDING * bench.size]
    bench.same("elements of all ranks beyond the padding", beyond, [])


@pytest.mark.api("named_parameters")
@pytest.mark.kills("KeepsItsPrefixInside", "StripsItsPrefixAlways")
@expects(
    "names outside",
    "names outside tell of the wrapper",
    "names inside",
    "names inside with a prefix",
    "names of its own",
    "names outside again",
)
def test_names_parameters_as_the_model_does_inside_summon(bench: Bench) -> None:
    names = list(parameters(tower()))
    root = bench.wrapped(tower())
    outside = _names(root.named_parameters())
    bench.same("names outside", [original(name) for name in outside], names)
    bench.same("names outside tell of the wrapper", outside == names, False)
    with bench.api.summon_full_params(root):
        bench.same("names inside", _names(root.named_parameters()), names)
        prefixed = _names(root.named_parameters(prefix="model"))
        bench.same("names inside with a prefix", prefixed, [f"model.{name}" for name in names])
        bench.same("names of its own", _names(root.named_parameters(recurse=False)), [])
    bench.same("names outside again", _names(root.named_parameters()), outside)


@pytest.mark.api("named_parameters", "FlatParameter")
@pytest.mark.kills("KeepsItsPrefixInside")
@expects("one for each unit", "their class", "values inside", "flat ones inside", "the same ones afterwards")
def test_shows_one_flat_parameter_for_each_unit_outside_summon(bench: Bench) -> None:
    root = bench.wrapped(tower(), use_orig_params=False)
    flat = list(root.parameters())
    bench.same("one for each unit", len(flat), 1 + len(UNITS))
    bench.same("their class", [isinstance(p, bench.names.FlatParameter) for p in flat], [True] * len(flat))
    with bench.api.summon_full_params(root):
        bench.same("values inside", copies(root.named_parameters()), parameters(tower()))
        kinds = {isinstance(p, bench.names.FlatParameter) for p in root.parameters()}
        bench.same("flat ones inside", kinds, {False})
    are_same = [p is q for p, q in zip(flat, root.parameters(), strict=False)]
    bench.same("the same ones afterwards", are_same, [True] * len(flat))


@pytest.mark.api("named_buffers")
@pytest.mark.kills("KeepsItsPrefixOfBuffersInside")
@expects("names outside", "buffers inside", "names inside with a prefix")
def test_names_buffers_as_the_model_does_inside_summon(bench: Bench) -> None:
    buffers = copies(tower().named_buffers())
    root = bench.wrapped(tower())
    bench.same("names outside", [original(name) for name in _names(root.named_buffers())], list(buffers))
    with bench.api.summon_full_params(root):
        bench.same("buffers inside", copies(root.named_buffers()), buffers)
        prefixed = _names(root.named_buffers(prefix="model"))
        bench.same("names inside with a prefix", prefixed, [f"model.{name}" for name in buffers])


# Any: tensors of any class.
def _names(named: Any) -> list[str]:
    return [name for name, _ in named]
