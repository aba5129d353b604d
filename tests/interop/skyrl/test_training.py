"""Code that was written for SkyRL, with only its imports changed."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyasync.algorithms.objective import Objective
from skyasync.envs import ENVS
from skyasync.errors import UserError
from skyasync.interop.skyrl import BasePPOExp, make
from skyasync.run.experiment import BasePPOExp as Ours
from skyasync.trainer.plans import PLANS
from tests.interop.harness import ROWS, configuration, train
from tests.interop.skyrl.files import (
    callbacks,
    endpoint_generator,
    environment,
    estimator,
    experiment,
    generator,
    hooks,
    loss,
    one_step_off,
    plain_loop,
    printed,
)

pytestmark = pytest.mark.slow

ENVS.pop("measure", None)  # which importing the file has registered: it exists for these tests alone
WITH_REWARD = ("environment.reward_funcs=[tests.interop.odd_reward:odd]", "data.label_key=answer")
SPECS = [{**row, "reward_spec": {"ground_truth": row["answer"]}} for row in ROWS]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Components that importing the files has registered exist for these tests alone."""
    environment.register(id="measure", entry_point=f"{environment.__file__}:Measure", kwargs={"bonus": 2.0})
    for name, function in (("clipped", loss.clipped), ("rollout", loss.weighted), ("average", loss.average)):
        loss.PolicyLossRegistry.register(f"peers_{name}", function)
    for name, function in (("batch_mean", estimator.batch_mean), ("per_prompt", estimator.per_prompt)):
        estimator.AdvantageEstimatorRegistry.register(f"peers_{name}", function)
    yield
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        for name in [name for name in registry if name.startswith("peers_")]:
            del registry[name]


def test_only_the_imports_are_ours() -> None:
    for file in (Path(__file__).parent / "files").glob("*.py"):
        tree = ast.parse(file.read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {m for m in modules if m and m.startswith("skyasync")} <= {"skyasync.interop.skyrl"}


def test_an_environment_with_tools_settings_and_metrics_of_every_kind() -> None:
    run = train(
        "environment.env_class=measure", "environment.env_config={start: 10, reward: {scale: 0.5}}",
        "generator.max_turns=2", rows=SPECS,
    )  # fmt: skip
    assert run.learned
    assert run.metrics["env/calls"] == 12.0
    assert 0.0 <= run.metrics["env/long"] <= 1.0
    assert "env/last_words" not in run.metrics
    assert run.metrics["reward/mean"] >= 4.0  # two turns with the registered bonus
    assert all("characters" in text for text in run.texts)


def test_an_environment_played_by_hand_and_by_its_reference() -> None:
    row = {"reward_spec": {"ground_truth": "4"}}
    config = {"measure": {"start": 1, "reward": {"scale": 1.0}}}
    env = make("measure", env_config=config, extras=row, bonus=5.0)
    env.init([])
    assert env.step("a")["reward"] == 6.0 and env.get_metrics() == {"calls": 2.0, "long": 0.0}
    reference = f"environment.env_class={environment.__file__}:Measure"
    run = train(reference, "environment.env_config={start: 0, reward: {scale: 1.0}}", rows=SPECS)
    assert run.metrics["env/calls"] == 3.0


def test_a_generator_that_asks_in_batches() -> None:
    run = train(*WITH_REWARD, exp=generator.PlainExp)
    assert run.learned
    assert run.metrics["response/length_max"] <= 5.0
    assert run.metrics["generate/phase"] == 1.0
    assert run.metrics["staleness/max"] == 0.0
    assert run.metrics["off_policy/abs_log_ratio"] < 1e-4


def test_a_generator_that_asks_over_http() -> None:
    run = train(*WITH_REWARD, "trainer.algorithm.off_policy_correction=none", exp=endpoint_generator.HttpExp)
    assert run.learned


@pytest.mark.parametrize("name", ["clipped", "rollout", "average"])
def test_a_loss(name: str) -> None:
    run = train(*WITH_REWARD, f"trainer.algorithm.policy_loss_type=peers_{name}", "trainer.policy_mini_batch_size=1")
    assert run.learned
    told = {"clipped": "policy/clip_ratio", "rollout": "policy/weight", "average": "policy/clip_ratio"}
    assert told[name] in run.metrics


def test_a_clipped_loss_has_the_gradient_of_ours() -> None:
    ours = train(*WITH_REWARD, "trainer.policy_mini_batch_size=1", "trainer.algorithm.off_policy_correction=none")
    theirs = train(
        *WITH_REWARD, "trainer.policy_mini_batch_size=1", "trainer.algorithm.off_policy_correction=none",
        "trainer.algorithm.policy_loss_type=peers_clipped",
    )  # fmt: skip
    for step in ours.rows:
        assert theirs.rows[step]["policy/grad_norm"] == pytest.approx(ours.rows[step]["policy/grad_norm"], rel=1e-4)


def test_a_loss_that_never_looks_at_the_rollout_corrects_nothing() -> None:
    for name, corrected in (("clipped", False), ("rollout", True)):
        overrides = (f"trainer.algorithm.policy_loss_type=peers_{name}", "trainer.algorithm.off_policy_correction=none")
        assert Objective(configuration(*WITH_REWARD, *overrides).trainer.algorithm).corrected is corrected


@pytest.mark.parametrize("name", ["batch_mean", "per_prompt"])
def test_an_advantage_estimator(name: str) -> None:
    run = train(*WITH_REWARD, f"trainer.algorithm.advantage_estimator=peers_{name}")
    assert run.learned
    assert estimator.AdvantageEstimatorRegistry.get(f"peers_{name}") is getattr(estimator, name)
    assert f"peers_{name}" in estimator.AdvantageEstimatorRegistry.list_available()


def test_an_estimator_that_reads_values_asks_for_a_critic() -> None:
    def rewarded(token_level_rewards, response_mask, index, values, **kwargs):
        return (token_level_rewards - values) * response_mask, token_level_rewards

    estimator.AdvantageEstimatorRegistry.register("peers_judged", rewarded)
    assert ADVANTAGE_ESTIMATORS.about("peers_judged").inputs[:2] == ("rewards", "values")
    assert "values" not in ADVANTAGE_ESTIMATORS.about("peers_per_prompt").inputs


def test_hooks_with_their_signatures() -> None:
    run = train(*WITH_REWARD, exp=hooks.LengthExp)
    assert run.learned
    assert run.metrics["mine/penalty"] > 0 and run.metrics["mine/advantage"] > 0
    assert run.metrics["reward/mean"] == pytest.approx(run.metrics["reward/avg_raw_reward"])
    assert "reward/avg_pass_at_2" in run.metrics and "loss/avg_raw_advantages" in run.metrics


@pytest.mark.parametrize("plan", ["one_step_off", "fully_async", "streamed"])
def test_hooks_on_a_plan_of_ours(plan: str) -> None:
    class Exp(BasePPOExp):
        def get_trainer(self, **parts):
            return type("Mine", (hooks.LengthHooks, PLANS.find(plan)), {})(**parts)

    run = train(*WITH_REWARD, f"trainer.plan={plan}", exp=Exp)
    assert run.learned
    assert run.metrics["mine/penalty"] > 0 and run.metrics["mine/advantage"] > 0


def test_callbacks_ask_for_a_checkpoint_and_an_evaluation(tmp_path: Path) -> None:
    callbacks.SEEN.clear()
    run = train(*WITH_REWARD, f"trainer.ckpt_path={tmp_path}", "trainer.ckpt_interval=5", exp=callbacks.WatchedExp)
    assert run.learned
    names = [name for name, _ in callbacks.SEEN]
    assert names[:3] == ["start", "epoch", "step"] and names[-1] == "end"
    assert [value for name, value in callbacks.SEEN if name == "step"] == [1, 2]
    assert [value for name, value in callbacks.SEEN if name == "later"] == [1, 2]
    saved = [value for name, value in callbacks.SEEN if name == "save"]
    assert saved[0].endswith("1") and Path(saved[0]).is_dir()
    assert run.metrics["mine/logged"] == 1.0 and run.metrics["mine/later"] == 2.0


def test_a_callback_with_an_event_that_does_not_exist_is_told() -> None:
    class Wrong(callbacks.TrainingCallback):
        def on_steps_end(self, trainer, callback_input, control):
            """A misspelled method."""

    class Exp(callbacks.WatchedExp):
        def get_trainer(self, *args, **kwargs):
            return callbacks.RayPPOTrainer(*args, callbacks=[Wrong()], **kwargs)

    with pytest.raises(UserError, match=r"unknown event 'on_steps_end': did you mean 'on_step_end'"):
        train(*WITH_REWARD, exp=Exp)


def test_an_experiment_with_a_configuration_of_its_own() -> None:
    cfg = experiment.configure({"mine.offset": 4, "trainer.algorithm.policy_loss_type": "gspo"})
    assert (cfg.mine.offset, cfg.trainer.algorithm.policy_loss_type) == (4, "gspo")
    made = experiment.WithOverlong.from_cli_overrides({"trainer.algorithm.overlong_buffer_len": 6})
    assert made.trainer.algorithm.overlong_buffer_len == 6
    with pytest.raises(UserError, match=r"mine\.ofset"):
        experiment.configure(["mine.ofset=4"])
    run = train(*WITH_REWARD, "mine.offset=6", exp=experiment.MineExp, schema=experiment.Config)
    assert run.learned
    assert all("5+" in text for text in run.texts)


def test_the_tutorials_loop_trains_one_step_off() -> None:
    run = train(
        *WITH_REWARD, "trainer.epochs=2", "trainer.max_training_steps=0", "trainer.plan=one_step_off",
        exp=one_step_off.OneStepOffExp,
    )  # fmt: skip
    assert run.learned
    assert sorted(run.rows) == list(range(1, 9))
    assert len(run.batches) == 8 and run.trainer.context.progress.step == 8
    assert {run.rows[step]["staleness/max"] for step in (2, 3, 4, 6, 7, 8)} == {1.0}
    assert run.rows[8]["trainer/epoch"] == 1.0
    assert run.trainer.policy_version == 8
    assert run.rows[3]["off_policy/kl"] >= 0 and run.rows[3]["timing/step"] > 0


def test_a_loop_of_plain_calls_saves_and_goes_on(tmp_path: Path) -> None:
    overrides = (*WITH_REWARD, f"trainer.ckpt_path={tmp_path}", "trainer.ckpt_interval=1")
    first = train(*overrides, exp=plain_loop.PlainExp)
    assert first.learned and sorted(first.rows) == [1, 2]
    assert Path(first.trainer.folder).is_dir()
    more = train(*overrides, "trainer.max_training_steps=3", "trainer.resume_mode=latest", exp=plain_loop.PlainExp)
    assert sorted(more.rows) == [3]
    assert more.trainer.context.progress.step == 3


@pytest.mark.parametrize("package", ["skyasync.interop.skyrl", "skyasync"])
def test_the_tutorials_printed_classes_alone_train_one_step_off(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(printed.__file__).read_text().replace("skyasync.interop.skyrl", package)
    module = ModuleType("printed_classes")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, printed.__file__, "exec"), vars(module))
    run = train(*WITH_REWARD, "trainer.epochs=1", "trainer.max_training_steps=0", exp=module.AsyncPPOExp)
    assert run.learned and sorted(run.rows) == [1, 2, 3, 4]
    assert [run.rows[step]["staleness/max"] for step in run.rows] == [0.0, 1.0, 1.0, 1.0]
    assert run.trainer.policy_version == 4


def test_the_complete_example_of_that_time_trains_one_step_off() -> None:
    class Trainer(one_step_off.OneStepOffTrainer):
        """Takes the output alone, and publishes weights by its own call."""

        async def _run_generate_loop(self, buffer):
            for number, prompts in enumerate(self.train_dataloader):
                generator_input, uids = one_step_off.prepare_generator_input(
                    self._remove_tail_data(prompts), self.cfg.generator.n_samples_per_prompt,
                    one_step_off.get_sampling_params_for_backend(
                        self.cfg.generator.backend, self.cfg.generator.sampling_params
                    ),
                    self.cfg.environment.env_class, "train", self.global_step,
                )  # fmt: skip
                generator_output = await self.generate(generator_input)
                generator_output = self.postprocess_generator_output(generator_output, uids)
                await buffer.put((generator_output, uids))
                if buffer.full() and number != 0:
                    self.generation_ack.set()
                    await self.sync_finished.wait()
                    self.sync_finished.clear()

        async def async_sync_policy_weights_to_inference_engines(self):
            return await self.policy_model.async_run_method(
                "pass_through", "broadcast_to_inference_engines", self.inference_engine_client
            )

    Trainer.dispatch = property(lambda self: Own(self))

    class Own:
        """The interface of the dispatch without weight sync, which SkyRL's trainer did itself at that time."""

        def __init__(self, trainer):
            self.trainer = trainer

        async def save_weights_for_sampler(self):
            await self.trainer.async_sync_policy_weights_to_inference_engines()

        def __getattr__(self, name):
            return getattr(self.trainer.context.dispatch, name)

    class Exp(BasePPOExp):
        def get_trainer(self, **parts):
            return Trainer(**parts)

    run = train(*WITH_REWARD, "trainer.epochs=1", "trainer.max_training_steps=0", exp=Exp)
    assert run.learned and sorted(run.rows) == [1, 2, 3, 4]
    assert {run.rows[step]["staleness/max"] for step in (2, 3, 4)} == {1.0}


def test_a_loop_of_theirs_that_reads_no_correction_no_number_of_steps_and_no_schedule_is_told(tmp_path: Path) -> None:
    loop = {"exp": one_step_off.OneStepOffExp}
    with pytest.raises(UserError, match=r"OneStepOffTrainer\.train trains samples of policy version 0 in step 2"):
        train(*WITH_REWARD, "trainer.epochs=1", "trainer.algorithm.off_policy_correction=none", **loop)
    with pytest.warns(UserWarning, match=r"trains on behind trainer\.max_training_steps=2"):
        train(*WITH_REWARD, "trainer.epochs=1", **loop)


@pytest.mark.matrix
def test_a_loop_of_theirs_whose_generation_fails_ends_the_run() -> None:
    class Trainer(one_step_off.OneStepOffTrainer):
        async def _run_generate_loop(self, buffer):
            try:
                raise KeyError("no such row")
            except Exception:
                sys.exit(1)  # as in the example

    class Exp(BasePPOExp):
        def get_trainer(self, **parts):
            return Trainer(**parts)

    with pytest.raises(KeyError, match="no such row"):
        train(*WITH_REWARD, "trainer.epochs=1", exp=Exp)


def test_an_experiment_of_that_time_runs_its_trainer_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exp(BasePPOExp):
        def run(self):
            trainer = self._setup_trainer()
            asyncio.run(trainer.train())

    ran = []
    monkeypatch.setattr(Ours, "run", ran.append)
    exp = Exp(configuration())
    exp.run()
    assert ran == [exp]
