"""Environment processes that fail or hang in the middle of an episode, which is repeated, or fails and is counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from skyasync.trainer.extensions.prompt_ledger import audit
from tests.chaos.audit import unlike, wrong_prompts, wrong_steps
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, read_lines
from tests.faults.environment_failures import OrderedFailures, Orders

pytestmark = [pytest.mark.slow, pytest.mark.fault]

BATCH, STEPS, SAMPLES = 8, 12, 4
PLAYS = 3  # of an episode that loses its process every time
ORDERS: Orders = {2: ["kill"], 4: ["stop"], 6: ["kill"] * PLAYS}
HOLDERS = ("controller", "workers", "engines", "environments", "object_store")
LIMIT_S = 45.0  # of a step: a hanging process is silent for 5 s plus a step's limit, the rest is for the machine


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed", "fully_async"])
def test_a_run_outlives_environments_that_are_killed_and_that_hang(
    plan: str, train: Train, tmp_path: Path
) -> None:
    (orders := tmp_path / "orders").mkdir()
    run = train(
        f"trainer.plan={plan}", f"trainer.max_training_steps={STEPS}",
        "environment.env_class=tests.faults.environment_failures:FailsByOrder",
        f"environment.env_config.orders={orders}",
        "environment.num_workers=1", "environment.step_timeout_s=2", "environment.on_error=mask",
        experiment=partial(OrderedFailures, orders=ORDERS),  # type: ignore[arg-type]
    )  # fmt: skip
    assert list(orders.iterdir()) == [], "every order was carried out"
    ledger, steps = read_lines(run.folder / "ledger.jsonl"), run.series("step")
    assert steps == list(range(1, STEPS + 1))
    assert wrong_steps(steps) + wrong_prompts(ledger) + unlike(ledger, steps) == []
    assert len(audit(ledger)) == STEPS * BATCH
    assert any(row.get("env/retries") for row in run.metrics), (
        "episodes of a lost process are repeated"
    )
    given_up = round(sum(run.series("env/given_up")) * BATCH * SAMPLES)
    assert 1 <= given_up <= 2 * BATCH * SAMPLES, (
        "episodes that lost their process three times in a row are counted"
    )
    assert max(run.series("time/step_s")) < LIMIT_S
    seen = {who for row in run.metrics for who in HOLDERS if row.get(f"memory/{who}_gib", 0) > 0}
    assert seen == set(HOLDERS), "one warning for each kind of process"
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
