"""The Python entry point: training, evaluation and rollouts, each as one call.

Invariant: a call is the command with the same settings. Its arguments become settings, and
``configuration`` checks them. The caller's functions, classes and rows are registered under names
for the time of the call, and travel with the run to its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import yaml

from skyasync.cli.train import configuration
from skyasync.config.keys import Keys
from skyasync.config.load import RECIPE, origins
from skyasync.config.schema import Config
from skyasync.config.values import dotted
from skyasync.envs import ENVS
from skyasync.errors import UserError
from skyasync.inference.interface import ENGINES
from skyasync.observability import TRACKERS
from skyasync.registry import Registry
from skyasync.rewards import REWARDS
from skyasync.run.experiment import BasePPOExp
from skyasync.trainer.plans import PLANS

if TYPE_CHECKING:
    import pandas

    from skyasync.callbacks import RunExtension
    from skyasync.observability.alarms import Alarm
    from skyasync.trainer import RayPPOTrainer

Row = Mapping[str, Any]
Prompts = str | Path | Iterable[Row] | Callable[[], Iterable[Row]]
OneReward = Callable[..., Any] | str
Environment = type | Callable[..., Any] | str  # a class, a function that makes one, or a name
Reward = OneReward | Mapping[OneReward, float] | Sequence[OneReward | tuple[OneReward, float]]
MODEL = "trainer.policy.model.path"
TRAIN = "data.train_data"
EVALUATION = "data.val_data"

#: Settings of a run by which its model answers a prompt: prefixes of their keys.
OF_ENGINES = (
    "data.apply_chat_template",
    "data.chat_template",
    "data.system_prompt",
    "generator.",
    "ray.",
    "trainer.max_prompt_length",
    "trainer.placement.colocate_all",
    "trainer.placement.policy_",
    "trainer.placement.timeout_s",
    "trainer.policy.model.",
)
OF_AGENTS = (
    "generator.agent_",
    "generator.endpoint_",
    "generator.reasoning_parser",
    "generator.tool_parser",
    "generator.turn_discount",
)

#: If a run sets one of these, the transformers engine may not be able to replace its engine.
OF_CHOSEN_ENGINES = (
    "generator.backend",
    "generator.engines",
    "generator.engine_kwargs",
    "generator.inference_engine_tensor_parallel_size",
)


def train(
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    reward: Reward | None = None,
    *,
    environment: Environment | None = None,
    plan: type | str | None = None,
    steps: int | None = None,
    eval_prompts: Prompts | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[RunExtension] = (),
    tracker: object = (),
) -> TrainResult:
    """Train a model; blocks until the run has ended.

    Ctrl-C, or stopping the cell of a notebook, ends the run and is raised.

    Args:
        model: a Hugging Face name or folder; the tiny example model by default, with its own task
            if there are no ``prompts`` either.
        prompts: rows with a ``prompt`` (text or a conversation) and any other columns: a list of
            mappings, a ``datasets.Dataset``, a function that returns rows, or a source as in
            ``data.train_data`` (a file, ...).
        reward: a function that takes ``response`` and any columns by name; or several, or a mapping
            or pairs with weights. A string is a name as in ``environment.reward_funcs``.
        environment: an environment class or its name, in place of ``reward``.
        plan: the name or the class of the execution plan; ``sync`` by default.
        steps: training steps; one pass over the prompts by default.
        eval_prompts: held-out rows, in the same forms.
        settings: any other setting, dotted or nested. A string value is read as on the command
            line.
        callbacks: accompany the run (``skyasync.TrainerCallback``).
        tracker: in addition to ``metrics.jsonl``, which is always written: a name as in
            ``trainer.logger``, a class, an object with ``log(metrics, step)`` and ``close()``, or
            several of them.

    Raises:
        UserError: for everything that is wrong with the arguments, before any process starts.
    """
    with ExitStack() as stack:
        arguments: dict[str, object] = {"trainer.max_training_steps": steps}
        if plan is None:
            arguments["trainer.plan"] = None
        else:
            arguments["trainer.plan"] = _named(stack, PLANS, plan)
        if isinstance(tracker, list | tuple):
            trackers = list(tracker)
        elif tracker is not None:
            trackers = [tracker]
        else:
            trackers = []
        if trackers:
            names = [_named(stack, TRACKERS, part) for part in trackers]
            arguments["trainer.logger"] = ["jsonl", *names]
        sources = {TRAIN: prompts, EVALUATION: eval_prompts}
        cfg, rows = stack.enter_context(
            _configured(model, sources, reward, environment, arguments, settings)
        )
        if "jsonl" not in cfg.trainer.logger:  # the result's history is read from its file
            cfg.trainer.logger = ["jsonl", *cfg.trainer.logger]
        experiment = _ExportingExperiment(cfg)
        experiment.data_rows |= rows
        if callbacks:
            # Here, so that importing this module does not load the checks of a run.
            from skyasync.preflight.parts import checked_callbacks

            experiment.callbacks = checked_callbacks(callbacks)
        metrics = experiment.run() or {}
    from skyasync.observability import jsonl
    from skyasync.observability.alarms import alarms_of

    folder = experiment.run_dir
    assert folder is not None
    report = folder.path / "report.html"
    rows_of_metrics = jsonl.read_rows(folder.metrics)
    return TrainResult(
        metrics=metrics,
        # Without rows that have no metric.
        history=[row for row in rows_of_metrics if row.keys() > {"step", "time"}],
        run_dir=folder.path,
        model=experiment.exported,
        report=report if report.is_file() else None,
        settings={**_of_recipe(cfg), **(settings or {})},
        alarms=alarms_of(folder.path),
    )


class _ExportingExperiment(BasePPOExp):
    """An experiment that always writes its final policy."""

    @property
    def exported(self) -> Path:
        """The exported policy, by default in the run's folder. Its name exists after ``prepare``."""
        assert self.run_dir is not None
        return Path(self.cfg.trainer.export_path or self.run_dir.path / "model")

    def build(self) -> RayPPOTrainer:
        """Make every part, in the controller's process."""
        # Before the base class, which makes this copy of the configuration read-only.
        self.cfg.trainer.export_path = str(self.exported)
        return super().build()


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Args:
        metrics: the newest value of every metric.
        history: one row per step, with ``step`` and ``time``.
        run_dir: the run's folder.
        model: the trained policy, a Hugging Face folder.
        report: the page about the run; None without ``trainer.report``.
        settings: the caller's settings, and those of the tiny example if the run was that.
        alarms: problems that the last steps show, causes first; each has a ``name`` and a ``text``
            that says what to change. Empty for a healthy run, and before 10 steps.
    """

    metrics: dict[str, float] = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    run_dir: Path
    model: Path
    report: Path | None
    settings: dict[str, Any] = field(repr=False)
    alarms: list[Alarm] = field(default_factory=list)

    def generate(self, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[str]:
        """One response of the trained policy to each prompt (text, or a conversation).

        An engine starts for this call, so pass all prompts at once. It is the transformers engine,
        which starts in a fraction of vLLM's time, unless the run's settings chose an engine.
        Sampling is that of evaluation. Agents and environments are left out: the model answers each
        prompt once.

        Raises:
            UserError: if a prompt has more than ``trainer.max_prompt_length`` tokens.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        rows = [{"prompt": prompt} for prompt in prompts]
        plan_keys: set[str] = set()
        for description in PLANS.builtins().values():
            plan_keys.update(description.can["reads"])
        engine_settings: dict[str, Any] = {}
        for key, value in _flat(self.settings):
            is_of_engines = key.startswith(OF_ENGINES) and not key.startswith(OF_AGENTS)
            # The settings of plans start with "generator." too, and mean nothing without training.
            if is_of_engines and key not in plan_keys and key != MODEL:
                engine_settings[key] = value
        engine_settings["generator.eval_n_samples_per_prompt"] = 1
        # Nothing is trained, so any sampling is allowed, also one that no correction supports.
        engine_settings["trainer.algorithm.off_policy_correction"] = "none"
        vllm_sampling = tuple(f".{name}" for name in ENGINES.about("vllm").can["sampling"])
        chosen = OF_CHOSEN_ENGINES
        if not any(key in chosen or key.endswith(vllm_sampling) for key in engine_settings):
            engine_settings["generator.backend"] = "transformers"
        episodes = rollouts(self.model, rows, "zero", settings=engine_settings, evaluation=True)
        if len(episodes) < len(rows):
            raise UserError(
                f"{len(rows) - len(episodes)} of {len(rows)} prompts have more tokens than the run's "
                f"trainer.max_prompt_length allows: shorten them"
            )
        return [episode["response"] for episode in episodes]

    def to_pandas(self) -> pandas.DataFrame:
        """The history as a data frame."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise UserError(
                "pandas is not installed; add it with: uv pip install pandas"
            ) from error
        return pandas.DataFrame(self.history)


def evaluate(
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    reward: Reward | None = None,
    *,
    environment: Environment | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Mean reward and pass@k of a model on prompts, as ``skyasync evaluate``.

    The arguments are as for ``train``.
    """
    from skyasync.cli.evaluate import measure
    from skyasync.cli.rollout_experiment import RolloutExperiment

    sources = {EVALUATION: prompts}
    with _configured(model, sources, reward, environment, {}, settings) as (cfg, rows):
        return measure(RolloutExperiment(cfg, evaluation=True, data_rows=rows))


def rollouts(
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    reward: Reward | None = None,
    *,
    environment: Environment | None = None,
    settings: Mapping[str, Any] | None = None,
    evaluation: bool = False,
) -> list[dict[str, Any]]:
    """Episodes of a model, as ``skyasync rollout``: messages, response, reward, segments.

    Nothing is trained.

    Args:
        evaluation: use the sampling of evaluation. The other arguments are as for ``train``.
    """
    from skyasync.cli.rollout import record
    from skyasync.cli.rollout_experiment import RolloutExperiment

    sources = {EVALUATION if evaluation else TRAIN: prompts}
    with _configured(model, sources, reward, environment, {}, settings) as (cfg, rows):
        experiment = RolloutExperiment(cfg, evaluation=evaluation, data_rows=rows)
        groups = experiment.play(experiment.prompts())
        tokenizer = experiment.get_tokenizer()
    episodes = []
    for group in groups:
        for trajectory in group.trajectories:
            sampled: list[int] = []
            for action in trajectory.actions:
                sampled += action.tokens.tolist()
            episode = dict(record(group, trajectory, tokenizer))
            episode["response"] = tokenizer.decode(sampled, skip_special_tokens=True)
            episodes.append(episode)
    return episodes


# ---------------------------------------------------------------- arguments as settings


@contextmanager
def _configured(
    model: str | Path | None,
    sources: Mapping[str, Prompts | None],
    reward: Reward | None,
    environment: Environment | None,
    arguments: Mapping[str, object],
    settings: Mapping[str, Any] | None,
) -> Iterator[tuple[Config, dict[str, Iterable[Row]]]]:
    """The configuration, and the caller's rows by source.

    The caller's functions and classes are registered until the block ends.
    """
    all_settings = dict(arguments)
    all_settings[MODEL] = None if model is None else str(model)
    rows: dict[str, Iterable[Row]] = {}
    with ExitStack() as stack:
        for key, prompts in sources.items():
            if isinstance(prompts, str | Path):
                all_settings[key] = [str(prompts)]
            elif prompts is not None:
                name = f"<{key.rpartition('.')[2]}>"  # which no file or module can have
                rows[name] = _rows(prompts)
                all_settings[key] = [name]
        if reward is not None and environment is not None:
            raise UserError(
                "reward and environment are both given: an environment gives its own reward"
            )
        if reward is not None:
            names = []
            weights = []
            for function, weight in _weighted(reward):
                names.append(_named(stack, REWARDS, function))
                weights.append(weight)
            all_settings["environment.reward_funcs"] = names
            all_settings["environment.reward_weights"] = weights
            all_settings["environment.env_class"] = "reward"
        if environment is not None:
            all_settings["environment.env_class"] = _named(stack, ENVS, environment)
        if reward is not None or environment is not None:
            all_settings["environment.env_class_from_rows"] = False
        all_settings = {key: value for key, value in all_settings.items() if value is not None}
        flat_settings = dict(_flat(settings or {}))
        conflicts = sorted(all_settings.keys() & flat_settings.keys())
        if conflicts:
            raise UserError(f"{conflicts[0]} is set twice, by an argument and by settings")
        all_settings |= flat_settings
        argv = [f"{key}={_text(key, value)}" for key, value in all_settings.items()]
        cfg: Config = configuration(argv)
        if cfg.data.streaming and rows.keys() & set(cfg.data.train_data):
            raise UserError(
                "data.streaming=true reads from a source: prompts must be a path or module:function"
            )
        yield cfg, rows


def _rows(prompts: Iterable[Row] | Callable[[], Iterable[Row]]) -> Iterable[Row]:
    rows = prompts() if callable(prompts) else prompts
    problem = f"prompts must be rows, a path or a function; found {type(rows).__name__}"
    if isinstance(rows, Mapping):  # as a DatasetDict
        raise UserError(f"{problem} with {', '.join(map(str, rows))}: pass one of its splits")
    if not isinstance(rows, Iterable):
        raise UserError(problem)
    if isinstance(rows, Sized):
        return rows
    return list(rows)  # a generator can be read only once


def _weighted(reward: Reward) -> list[tuple[OneReward, float]]:
    """The reward functions with their weights, 1 by default."""
    pairs: list[tuple[OneReward, float]] = []
    if isinstance(reward, Mapping):
        pairs += reward.items()
    elif isinstance(reward, str) or not isinstance(reward, Iterable):
        pairs.append((reward, 1.0))
    else:
        for entry in reward:
            pairs.append(entry if isinstance(entry, tuple) else (entry, 1.0))
    for function, _ in pairs:
        if not isinstance(function, str) and not callable(function):
            raise UserError(f"reward must be a function or a name, or several; found {function!r}")
    return pairs


def _named(stack: ExitStack, registry: Registry, part: object) -> str:
    """The name of a part in a registry.

    A part that is not a name itself is registered by its own name until the stack closes.
    """
    if isinstance(part, str):
        return part
    if not callable(part) and not (registry is TRACKERS and hasattr(part, "log")):
        raise UserError(f"{part!r} is no {registry.kind}: pass a name, a class or a function")
    if isinstance(part, type | FunctionType):
        base_name = part.__name__
    else:
        base_name = type(part).__name__
    if not base_name.isidentifier():  # "<lambda>"
        base_name = registry.kind.replace(" ", "_")
    name = base_name
    number = 1
    while name in registry or name in registry.names():
        number += 1
        name = f"{base_name}_{number}"
    if registry is TRACKERS and not isinstance(part, type):
        # The registry has classes and functions that make a tracker of its context.
        registry[name] = lambda context: part
    else:
        registry[name] = part
    stack.callback(registry.pop, name)
    return name


def _of_recipe(cfg: Config) -> dict[str, Any]:
    """The settings of the tiny example, if the run is that."""
    settings = {}
    for key, origin in origins(cfg).items():
        if origin == RECIPE and key != MODEL:
            settings[key] = attrgetter(key)(cfg)
    return settings


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a mapping that is not a group of settings is a value."""
    return dotted(settings, lambda path, group: path in Keys.of(Config).groups)


def _text(key: str, value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, str | Path):
        return str(value) or '""'  # an empty text would be null
    try:
        text = yaml.safe_dump(
            value, default_flow_style=True, allow_unicode=True, width=float("inf")
        )
    except yaml.representer.RepresenterError:
        raise UserError(
            f"{key}={value!r}: a setting is a number, text, a list or a mapping"
        ) from None
    return text.removesuffix("\n").removesuffix("\n...")
