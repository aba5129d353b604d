"""Trains with a user's files, as the command line gets them, for a step or two in this process.

The configuration, the rows, environments, reward functions, agent programs, the endpoint, the engine, the policy and
the weight sync are the real ones; only a cluster's separate processes are left out, since they cost seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoTokenizer

from skyasync.agents.generator import AgentGenerator, agent_config
from skyasync.agents.programs import AgentPool, AgentProcess
from skyasync.agents.server import Endpoint
from skyasync.config import load_config
from skyasync.config.schema import Config
from skyasync.data.datasets import load_prompts
from skyasync.envs.pool import local_pool
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.client import InferenceClient
from skyasync.preflight.parts import check_parts
from skyasync.preflight.prepare import settle_references
from skyasync.rewards.settings import env_settings
from skyasync.rollout.episode_limits import EpisodeLimits
from skyasync.rollout.generator import EpisodeGenerator
from skyasync.run.experiment import BasePPOExp
from skyasync.trainer.plans import PLANS
from skyasync.utils.rpc import LocalTransport
from skyasync.weight_sync.sync import WeightSync
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import RecordingDispatch, Rows, engine_config

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
LENGTH = 192  # of a sequence
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in range(2)]
PROBE = [[1, 2, 3, 4, 5], [9, 8, 7]]


@cache
def model() -> str:
    folder = Path(mkdtemp(prefix="peers-"))
    save_tiny_llama(folder, tied=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model())


def configuration(*overrides: str, schema: Any = Config) -> Any:
    """Small and quick; every override is a user's own."""
    usual = {
        "trainer.policy.model.path": model(), "trainer.policy.threads": 1, "trainer.train_batch_size": 2,
        "trainer.max_training_steps": 2, "trainer.eval_before_train": "false", "trainer.eval_interval": 0,
        "trainer.max_prompt_length": 160, "generator.n_samples_per_prompt": 2, "generator.max_model_len": LENGTH,
        "generator.sampling_params.max_generate_length": 8, "generator.backend": "transformers",
        "generator.eval_sampling_params.max_generate_length": 8,
    }  # fmt: skip
    given = {override.partition("=")[0] for override in overrides}
    kept = [f"{name}={value}" for name, value in usual.items() if name not in given]
    return load_config([*kept, *overrides], schema=schema)


class Local(BasePPOExp):
    """An experiment whose parts are in this process. ``train()`` runs it to its end."""

    rows: Sequence[dict[str, Any]] = ROWS
    length = LENGTH

    def get_train_dataset(self) -> Any:
        source = "rows"
        self.cfg.data.train_data = [source]
        return load_prompts(
            [source],
            self.cfg,
            self.get_tokenizer(),
            loaded_rows={source: [dict(row) for row in self.rows]},
        )

    def get_tokenizer(self) -> Any:
        return tokenizer()

    def get_tracker(self) -> Any:
        return Rows()

    def engine_config(self) -> Any:
        return engine(self.length)

    def get_inference_client(self) -> InferenceClient:
        return InferenceClient([TransformersEngine(engine(self.length))], 60, tokenizer)

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        if cfg.generator.agent_program:
            return self.get_agent_generator(cfg, tokenizer, inference_engine_client)
        pool = local_pool(env_settings(cfg.environment))
        return EpisodeGenerator(
            inference_engine_client,
            pool,
            tokenizer,
            self.length,
            EpisodeLimits.of(cfg),
            cfg.data.apply_chat_template,
        )

    def get_agent_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        endpoint = Endpoint(inference_engine_client, tokenizer, self.length)
        program, config = cfg.generator.agent_program, agent_config(cfg, self.length)
        pool = AgentPool(lambda: LocalTransport(AgentProcess(program, config)))
        return AgentGenerator(endpoint, pool, tokenizer, EpisodeLimits.of(cfg))

    async def train(self) -> Run:
        cfg = self.cfg
        settle_references(cfg)
        check_parts(cfg, [PLANS.find(cfg.trainer.plan)])
        client = self.get_inference_client()
        dispatch, tracker = RecordingDispatch(cfg), self.get_tracker()
        generator = self.get_generator(cfg, self.get_tokenizer(), client)
        trainer = self.get_trainer(
            cfg=cfg, tracker=tracker, tokenizer=self.get_tokenizer(), train_dataset=self.get_train_dataset(),
            eval_dataset=self.get_eval_dataset(), inference_engine_client=client, generator=generator,
            colocate_pg=None,
        )  # fmt: skip
        trainer.callbacks.extend(self.get_callbacks())
        trainer.attach(dispatch, WeightSync(dispatch, client, PROBE, 1e-3))
        before = dispatch.weights()
        await client.start()
        try:
            await trainer.run()
        finally:
            await dispatch.shutdown()
            if hasattr(generator, "close"):
                await generator.close()
            await client.shutdown()
        return Run(trainer, tracker, dispatch, before)


class Run:
    """The result of a run."""

    def __init__(
        self, trainer: Any, tracker: Rows, dispatch: RecordingDispatch, before: dict[str, Any]
    ) -> None:
        self.trainer, self.rows, self.dispatch = trainer, tracker.rows, dispatch
        self.batches = dispatch.batches
        after = dispatch.weights()
        self.learned = any(not before[name].equal(after[name]) for name in before)

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric."""
        return {
            name: value for step in sorted(self.rows) for name, value in self.rows[step].items()
        }

    @property
    def texts(self) -> list[str]:
        """The trained rows as text."""
        found = [
            (t, m)
            for batch in self.batches
            for t, m in zip(batch.tokens, batch.attention_mask, strict=True)
        ]
        return [tokenizer().decode(tokens[mask].tolist()) for tokens, mask in found]


def engine(length: int) -> Any:
    from dataclasses import replace

    return replace(engine_config(model()), max_model_len=length)


def train(
    *overrides: str, rows: Sequence[dict[str, Any]] = ROWS, exp: type = BasePPOExp, schema: Any = Config,
    length: int = LENGTH,
) -> Run:  # fmt: skip
    """Train with these overrides, by default with the library's experiment."""
    bases = (Local,) if exp is BasePPOExp else (exp, Local)
    local = type(f"Local{exp.__name__}", bases, {"rows": rows, "length": length})
    return asyncio.run(local(configuration(*overrides, schema=schema)).train())
