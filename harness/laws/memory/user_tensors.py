"""The law over what is the user's: no engine takes its memory away."""

from __future__ import annotations

from dataclasses import dataclass

from harness.laws.law import Evidence, Ruling, rule
from harness.laws.memory.sight import reports

__all__ = ["UserTensorsLive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTensorsLive:
    """No tensor of the user's has its memory resized or exchanged: inputs, outputs, buffers, ignored parameters.

    ``at_least`` names what must have been among them, by the beginning of the names that the watch gives.
    """

    at_least: tuple[str, ...] = ("an input", "an output")

    @property
    def name(self) -> str:
        """Say the law."""
        known = f" ({', '.join(self.at_least)})" if self.at_least else ""
        return f"the user's tensors keep their memory{known}"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at each tensor of the user's on every rank."""
        broken: list[str] = []
        num_tensors = 0
        for rank, report in reports(evidence, broken):
            num_tensors += len(report.user_tensors)
            broken += [
                f"rank {rank}: expected {name} among the user's tensors, got none"
                for name in self.at_least
                if not any(tensor.name.startswith(name) for tensor in report.user_tensors)
            ]
            broken += [
                f"rank {rank}: expected {tensor.name} left alone, but {tensor.change}"
                for tensor in report.user_tensors
                if tensor.change
            ]
        return rule(self.name, broken, held=f"all {num_tensors} on {evidence.world_size} ranks")
