"""Cases of the suites that specify the reference engine, judged on it; no test repeats them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest

# By engine and file: words of the cases, none for all of the file.
CASES = {
    "reference": {
        "sharding_state/test_policy.py": "what_the_policy_says",
        "sharding_state/test_control.py": "holds_the_head",
        "accumulation/test_holding_back.py": "shards_reduce_as_told",
        "communication/test_hybrid.py": "within_and_across_replicas",
        "communication/test_precision.py": "",
        "composable/test_training.py": "without_memory or are_each_ranks_own or first_rank or is_deleted",
        "composable/test_units.py": "stay_what_they_were or across_replicas",
        "interventions/test_freezing.py": "freezes_and_unfreezes and later",
        "interventions/test_gradients.py": "hooks_see or backward_is_one",
        "placement/test_largest_dim.py": "",
        "state/test_resume.py": "tied",
    },
    "reference.wrapper": {
        "precision/test_scaler.py": "",
        "wrapper/test_optim_state.py": "not_wrapped or another_wrapping",
        "wrapper/test_state_dicts.py": "not_wrapped or another_wrapping",
    },
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", CASES)
def test_conforms(engine: str, tmp_path: Path) -> None:
    words = (f"{Path(file).stem} and ({chosen or 'test'})" for file, chosen in CASES[engine].items())
    files = [f"suites/{file}" for file in CASES[engine]]
    options = [f"--engine={engine}", "--world=threads:4", f"--out={tmp_path}", "-k", " or ".join(words)]
    assert call_pytest([*files, *options]) == 0
    records = read_run(tmp_path).records
    assert {record.verdict for record in records} <= {Verdict.PASSED, Verdict.UNSUPPORTED}
    passed = {record.case.split("::")[0] for record in records if record.verdict is Verdict.PASSED}
    assert passed == set(CASES[engine])
