"""``skyasync sft``: supervised fine-tuning on the workers of a run, without engines and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Unpack

from skyasync.cli.commands import Arguments, take_options
from skyasync.config.keys import Keys
from skyasync.config.load import COMMAND_LINE, RECIPE, origins
from skyasync.config.schema import AlgorithmConfig, Config
from skyasync.data.demonstrations import load_demonstrations, read_demonstration
from skyasync.errors import UserError
from skyasync.observability.run_dir import default_run_name, shown
from skyasync.preflight.data import first_rows
from skyasync.preflight.prepare import settle_references
from skyasync.run.experiment import EnginelessExperiment
from skyasync.trainer.supervised import OBJECTIVE, SupervisedTrainer

if TYPE_CHECKING:
    from skyasync.rollout.types import Prompt
    from skyasync.trainer import RayPPOTrainer
    from skyasync.trainer.context import TrainerArguments

HELP = """\
usage: skyasync sft [--config FILE.yaml] [key=value ...]

Trains trainer.policy.model.path on given responses: rows of data.train_data with a prompt and a completion (or
response), or with messages. The loss is the cross-entropy of the responses' tokens. Settings are those of training;
one that has no effect here is an error. With data.val_data the loss on those rows is reported as eval/loss.

The model is written to trainer.export_path, or to model in the run's folder. Training then starts from it:
skyasync train trainer.policy.model.path=runs/NAME/model
"""

_READ = {
    "trainer.": (
        "policy. parallel. placement.policy_ placement.timeout_s algorithm.loss_reduction algorithm.max_seq_len "
        "strategy epochs max_training_steps train_batch_size policy_mini_batch_size update_epochs_per_batch micro_ "
        "max_prompt_length eval_batch_size eval_interval eval_minutes eval_before_train ckpt_ resume_mode export_ "
        "profile_steps run_name runs_dir project_name logger terminal seed step_timeout_s save_samples "
        "dump_trajectories report live_page sigterm_grace_s max_restarts heartbeat_timeout_s on_nonfinite on_spike "
        "spike_limits max_bad_steps"
    ),
    "data.": "train_data val_data prompt_key apply_chat_template chat_template chat_template_kwargs system_prompt",
    "generator.": "sampling_params.max_generate_length",
}
_PREFIXES = ["ray."]
for _group, _keys in _READ.items():
    _PREFIXES += [_group + _key for _key in _keys.split()]
#: Beginnings of the keys that have an effect.
READ = tuple(_PREFIXES)
#: Exceptions to ``READ``.
NOT_READ = ("trainer.policy.router_replay", "trainer.policy.lora.sync", "trainer.ckpt_rollouts")


def sft(argv: Arguments) -> None:
    """Train on given responses."""
    from skyasync.cli.train import main

    _, arguments = take_options(argv, {}, (), settings=True)
    main(SupervisedExperiment, arguments)


def check_settings(cfg: Config) -> None:
    """Raises ``UserError`` for the first setting of the user's that has no effect."""
    keys = Keys.of(type(cfg))
    model = cfg.trainer.policy.model.path
    for path, origin in origins(cfg).items():
        holder = keys.holder(path)
        if origin == RECIPE or holder is None:  # of the example, or of no group of the schema
            continue
        if path.startswith(READ) and not path.startswith(NOT_READ):
            continue
        if origin == COMMAND_LINE:
            prefix = ""
        else:
            value = attrgetter(holder.path)(cfg)
            # The config.yaml of a run has all keys, and the policy's model for other roles.
            if value == holder.default or (path.endswith(".model.path") and value == model):
                continue
            prefix = f"{origin}: "
        raise UserError(
            f"{prefix}{path} has no effect with skyasync sft, which generates nothing: remove it"
        )


class SupervisedExperiment(EnginelessExperiment):
    """A run that learns demonstrations.

    Raises:
        UserError: for a setting that has no effect.
    """

    def __init__(self, cfg: Config) -> None:
        check_settings(cfg)
        super().__init__(cfg)
        trainer = cfg.trainer
        algorithm = trainer.algorithm
        algorithm_settings = {
            "loss_reduction": algorithm.loss_reduction,
            "max_seq_len": algorithm.max_seq_len,
        }
        trainer.algorithm = AlgorithmConfig(**OBJECTIVE, **algorithm_settings)  # type: ignore[arg-type]
        trainer.run_name = trainer.run_name or default_run_name("sft")

    def prepare(self) -> None:
        # Before the rows are read, whose paths it makes absolute.
        settle_references(self.cfg)
        data = self.cfg.data
        if not data.train_data:
            raise UserError("there are no demonstrations: name data.train_data")
        for source in (*data.train_data, *data.val_data):
            for index, row in enumerate(first_rows(source, self.cfg, self.data_rows)):
                read_demonstration(index, row, data)
        super().prepare()

    def get_train_dataset(self) -> Sequence[Prompt]:
        return load_demonstrations(
            self.cfg.data.train_data,
            self.cfg,
            self.tokenizer,
            loaded_rows=self.data_rows,
        )

    def get_eval_dataset(self) -> Sequence[Prompt]:
        return load_demonstrations(
            self.cfg.data.val_data,
            self.cfg,
            self.tokenizer,
            is_eval=True,
            loaded_rows=self.data_rows,
        )

    def build(self) -> RayPPOTrainer:
        """Set the export path in the controller's process, before its configuration is frozen."""
        assert self.run_dir is not None
        trainer = self.cfg.trainer
        trainer.export_path = trainer.export_path or str(self.run_dir.path / "model")
        return super().build()

    def run(self) -> dict[str, float] | None:
        metrics = super().run()
        if metrics is not None and self.run_dir is not None:
            model = self.cfg.trainer.export_path or shown(self.run_dir.path / "model")
            print(f"model: {model}")
        return metrics

    def get_trainer(self, **components: Unpack[TrainerArguments]) -> RayPPOTrainer:  # type: ignore[override]
        return SupervisedTrainer(**components)
