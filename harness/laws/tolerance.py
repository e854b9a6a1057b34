"""The tolerance between an engine's tensor and the oracle's: derived from measured noise, never picked by hand."""

from __future__ import annotations

import torch

from shardproof.harness.oracle.oracle_observation import OracleObservation, Quantity, TensorKey
from shardproof.harness.oracle.rounding import is_narrow
from shardproof.harness.torch_compat.dtypes import is_rounded

# [Note: the multiple]
# Measured with single-process trainings whose sums were taken in orders that the noise runs do not use (other
# permutations, trees and divisions, and the foreach optimizers): every problem with SGD and AdamW, worlds 1
# to 4, microbatches 1, 3 and 4, two accumulations, two seeds of weights and data - 30 000 tensors of three
# steps. Their error over max(noise, floor) had median 0.4, 99.9th percentile 1.8 and maximum 1.83; with
# gradients reduced in bfloat16, maximum 6.2 but for one gradient of a single element (12.6), which is why a
# gradient's floor is in the reduction's dtype, and in that of computation: re-ordered sums leave what one rank
# computes as it is, and four elements of a Mamba were all right to a quarter of a step there. 16 leaves 8 times
# the worst float32 case. On the other side, a parameter of the fixtures may then be off by at most 2e-5 of its
# largest element, where the smallest real defect that we know of makes 1.2e-4 and a reduction in bfloat16 1e-3; a
# test holds the fixtures to that.
MULTIPLE = 16.0

# A tensor of few elements may happen not to deviate in any noise run. Two roundings of its largest value are always
# possible. Where the reference has as few bits as the engine, as bfloat16, two steps are the whole tolerance: it rounds
# as the engine does, up to the reduction, and 16 times that would be a quarter of the tensor's largest value.
FLOOR_ROUNDINGS = 2.0


# Runs that round each operator anew, including the optimizer's, cover nearly all that another engine may do
# differently. For Muon in bfloat16, whose rounding is a fifth of each update, FSDP2 deviates by 1.8 times that noise,
# and other engines by none of it.
_MULTIPLE_OF_DISTURBED = 4.0
# A gradient may be off by the two steps of its floor; a square has them twice, and rounds once more: all engines were
# off by 1.3 times what two steps allow in a second moment of float64.
_STEPS_OF_STATE = 2 * FLOOR_ROUNDINGS + 1

# How many steps of the narrowest dtype a value may be off, however little the noise runs were. Momentum is a sum of
# gradients: that of one element was off by two thirds of a step of bfloat16, where no run was by more than a fiftieth.
# A loss is computed from values of that dtype: one was off by a seventh of a step of float16, no run by a hundredth.
_LEAST_STEPS = {Quantity.OPTIMIZER_STATE: FLOOR_ROUNDINGS, Quantity.LOSS: 1.0}


def allowed_error(oracle: OracleObservation, place: TensorKey, noise: float | None = None) -> float:
    """Return the largest absolute error that re-ordered sums explain; zero where no rounding is possible.

    ``noise`` is that of a part of the tensor, instead of that of the rest.

    Zero for exact trainings, for initial parameters, which are not computed, for constant buffers (a mask may hold
    numbers so large that their roundings would hide all others) and for integers.
    """
    # A loss is a float of Python. So is a norm, but for the few bits that it has in a model of bfloat16.
    dtype = torch.float32 if place.quantity is Quantity.LOSS else oracle.dtype(place.quantity, place.name)
    dtype = torch.float32 if place.quantity is Quantity.NORM and not is_narrow(dtype) else dtype
    is_as_built = place.quantity is Quantity.INITIAL and not oracle.is_trained_before
    if oracle.is_exact or is_as_built or not is_rounded(dtype):
        return 0.0
    if place.quantity is Quantity.BUFFER and place.name in oracle.constants:
        return 0.0
    return error_of_noise(oracle, place, oracle.noise[place] if noise is None else noise, dtype)


def error_of_noise(
    oracle: OracleObservation, place: TensorKey, noise: float, dtype: torch.dtype = torch.float32
) -> float:
    """Return the allowed error where noise was measured in ``dtype``."""
    is_state = place.quantity is Quantity.OPTIMIZER_STATE
    roundings = _STEPS_OF_STATE if is_state and oracle.is_widened else FLOOR_ROUNDINGS
    floor = roundings * torch.finfo(dtype).eps * oracle.scales[place]
    if not oracle.is_widened and place.quantity in {Quantity.PARAMETER, Quantity.OPTIMIZER_STATE}:
        return _disturbed(place, noise, floor, dtype)
    if not oracle.is_widened and is_narrow(dtype):
        return max(MULTIPLE * noise, floor)
    rounded_to = (oracle.plan.reduction_dtype, oracle.plan.compute_dtype)
    step = max((torch.finfo(dtype).eps for dtype in rounded_to if dtype is not None), default=0.0)
    coarse = step * oracle.scales[place]
    # A maximum norm is one gradient; whether a norm is that of the gradients is a law of its own.
    if place.quantity in {Quantity.GRADIENT, Quantity.NORM}:
        floor = max(floor, coarse)
    return max(MULTIPLE * max(noise, floor), _LEAST_STEPS.get(place.quantity, 0.0) * coarse)


def _disturbed(place: TensorKey, noise: float, floor: float, dtype: torch.dtype) -> float:
    """Return the allowed error of an optimizer's result, where its own operators were disturbed too.

    An error within a low-precision step is the last bit of an update, no sign of a larger error, and a parameter has
    one of each update. A state also has those of the gradient that went into it: correct engines differ by two steps on
    four and five ranks, by two and a half on a GPU, and by three and a half where they add up microbatches.
    """
    if is_narrow(dtype):
        is_state = place.quantity is Quantity.OPTIMIZER_STATE
        step = floor / FLOOR_ROUNDINGS * (_STEPS_OF_STATE if is_state else 1.0)
        num_updates = 1 if is_state else place.step + 1
        return max(step * num_updates, step + _MULTIPLE_OF_DISTURBED * (noise - step))
    return max(_MULTIPLE_OF_DISTURBED * noise, MULTIPLE * floor)
