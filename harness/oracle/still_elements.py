"""The elements of a user's parameters that have no gradient, where the others of the same tensor have one.

[Note: still elements] The bias of keys in attention has a gradient that is zero but for rounding. Where one tensor
holds the biases of queries, keys and values, Adam divides that rounding by itself and takes whole steps at random,
while the neighbours are right to a few roundings. So such elements have a noise of their own, and do not hide their
neighbours.
"""

from __future__ import annotations

import torch

from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.oracle.oracle_observation import OracleObservation, Tensors

# In float64, a gradient so small beside the largest of its model is zero but for rounding: that of a bias before a
# normalisation, or of a key's bias in attention.
ZERO_BESIDE = 1e-10


def still_elements(training: Training, exact: OracleObservation) -> Tensors:
    """Return a mask for each parameter that has such elements, if the reference is exact enough to tell."""
    problem = training.problem
    if not (isinstance(problem, UserModel) and exact.is_widened):
        return {}
    found = {name: _most(exact, name) for name in exact.initial if name not in problem.idle}
    zero = ZERO_BESIDE * max((largest(most) for most in found.values() if most is not None), default=0.0)
    masks = {name: most <= zero for name, most in found.items() if most is not None}
    return {name: mask for name, mask in masks.items() if mask.any() and not mask.all()}


def _most(exact: OracleObservation, name: str) -> torch.Tensor | None:
    """Return the largest absolute gradient of each element over all steps; None without any."""
    gradients = [g.abs() for step in exact.steps if (g := step.gradients.get(name)) is not None]
    return torch.stack(gradients).amax(0) if gradients else None
