"""Forty faults of the kind that end a run on a cluster, each planted in a recipe: ``skyasync rehearse`` names them.

Each answer is one line with the key or part, what was found, and what is allowed or what to do.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import skyasync.run.ray_cluster
from skyasync.__main__ import command
from tests.user_errors.conftest import ROWS, TEMPLATE, make_model

PARTS = '''
from skyasync import BaseTextEnv
from skyasync.envs import tool
from skyasync.models.fsdp.backend import FSDPBackend

def fine(response, answer):
    return float(answer in response)

def misspelt(response, solutoin):
    return 0.0

def with_length(response):
    return 1.0, {"length": len(response)}

def late(response):
    with open(__file__ + ".calls", "a+") as calls:
        calls.write("x")
        assert calls.tell() < 12, "no answer to compare with"
    return 1.0

class Tools(BaseTextEnv):
    @tool
    def look_up(self, name: str) -> str:
        """A number in the telephone book.

        Args:
            name: of a person.
        """
        return "555"

    def step(self, action):
        text, answers = self.call_tools(action)
        return {"observations": answers, "reward": 0.0, "done": not answers, "metadata": {}}

class Renamed(FSDPBackend):
    def sharded_weights(self):
        return {name.replace("model.norm", "model.last_norm"): w for name, w in super().sharded_weights().items()}

def needs_old(current, old_logprobs, advantages):
    return current
'''
#: What is planted, and what its line says. ``{x}`` is the folder of ``planted``.
NAMED: dict[str, tuple[list[str], list[str]]] = {
    # data
    "wrong column": (
        ["data.prompt_key=quesiton"],
        ["data.prompt_key", "'quesiton'", "did you mean 'question'"],
    ),
    "wrong label": (
        ["data.label_key=anwser"],
        ["data.label_key", "'anwser'", "did you mean 'answer'"],
    ),
    "missing file": (
        ["data.train_data=[{x}/row.jsonl]"],
        ["row.jsonl", "did you mean 'rows.jsonl'"],
    ),
    "missing held-out file": (
        ["data.val_data=[{x}/test.parquet]"],
        ["test.parquet", "does not exist"],
    ),
    "empty file": (["data.train_data=[{x}/empty.jsonl]"], ["empty.jsonl", "no rows"]),
    "broken line": (["data.train_data=[{x}/broken.jsonl]"], ["broken.jsonl", "row 0"]),
    "length too short": (
        ["trainer.max_prompt_length=3"],
        ["trainer.max_prompt_length=3", "raise it to at least"],
    ),
    "length beyond the model": (
        ["generator.sampling_params.max_generate_length=8192", "generator.backend=vllm"],
        ["max_generate_length=8192", "max_position_embeddings=2048"],
    ),
    "engine shorter than its work": (
        ["generator.max_model_len=512"],
        ["generator.max_model_len=512", "1088"],
    ),
    "conversations as text": (
        ["data.train_data=[{x}/messages.jsonl]", "data.apply_chat_template=false"],
        ["data.apply_chat_template=false"],
    ),
    # template
    "no template": (
        ["trainer.policy.model.path={x}/no_template"],
        ["no_template", "data.apply_chat_template=false"],
    ),
    "missing template": (["data.chat_template={x}/qwen.jinja"], ["qwen.jinja"]),
    "template that refuses a system prompt": (
        ["data.chat_template={x}/strict.jinja", "data.system_prompt=Be brief."],
        ["roles system, user", "no system role here", "data.system_prompt"],
    ),
    # model
    "no model": (["trainer.policy.model.path={x}/qwen"], ["trainer.policy.model.path", "qwen"]),
    "no tokenizer": (["trainer.policy.model.path={x}/no_tokenizer"], ["no_tokenizer", "tokenizer"]),
    "tensor that does not divide": (
        ["trainer.parallel.tensor=4"],
        ["trainer.parallel.tensor=4", "num_attention_heads=2", "1 or 2"],
    ),
    "more stages than layers": (
        ["trainer.parallel.pipeline=4"],
        ["trainer.parallel.pipeline=4", "2 layers"],
    ),
    "ranks that do not divide": (["trainer.parallel.tensor=3"], ["trainer.parallel.tensor=3", "8"]),
    "experts of a dense model": (
        ["trainer.parallel.expert=4"],
        ["trainer.parallel.expert=4", "not a mixture"],
    ),
    "engine's tensor size": (
        ["generator.backend=vllm", "generator.inference_engine_tensor_parallel_size=4"],
        ["generator.inference_engine_tensor_parallel_size=4", "2 attention heads", "1 or 2"],
    ),
    "frozen nothing": (["trainer.policy.freeze=[tower]"], ["trainer.policy.freeze", "tower"]),
    "adapters on nothing": (
        ["trainer.policy.lora.rank=4", "trainer.policy.lora.target_modules=[q_poj]"],
        ["q_poj", "q_proj"],
    ),
    "stop token beyond the vocabulary": (
        ["generator.sampling_params.stop_token_ids=[151645]"],
        ["stop_token_ids", "151645", "0 to 255"],
    ),
    "reward model with two labels": (
        ["trainer.reward.model.path={x}/two_labels"],
        ["two_labels", "2 labels"],
    ),
    # rewards, environments, parts
    "reward's missing column": (
        ["environment.reward_funcs=[{x}/parts.py:misspelt]"],
        ["solutoin", "question, answer"],
    ),
    "reward file that cannot be imported": (
        ["environment.reward_funcs=[{x}/imports.py:score]"],
        ["imports.py", "sympyy"],
    ),
    "unknown environment": (
        ["environment.env_class=gsm9k", "environment.reward_funcs=[]"],
        ["'gsm9k'", "did you mean 'gsm8k'"],
    ),
    "loss with an unknown parameter": (
        ["trainer.algorithm.policy_loss_type={x}/parts.py:needs_old"],
        ["'old_logprobs'", "proximal"],
    ),
    # settings
    "unknown key": (["trainer.algorithm.eps_clip=0.2"], ["eps_clip", "eps_clip_low"]),
    "unknown estimator": (
        ["trainer.algorithm.advantage_estimator=grpoo"],
        ["'grpoo'", "did you mean 'grpo'"],
    ),
    "groups of one": (["generator.n_samples_per_prompt=1"], ["n_samples_per_prompt=1", "grpo"]),
    "mini-batches that do not divide": (
        ["trainer.policy_mini_batch_size=100"],
        ["trainer.policy_mini_batch_size=100", "256"],
    ),
    "two plans' settings": (
        ["trainer.max_staleness=4"],
        ["trainer.max_staleness=4", "trainer.plan=one_step_off", "fully_async"],
    ),
    "NCCL on shared devices": (
        [
            "trainer.plan=sync",
            "trainer.placement.colocate_all=true",
            "generator.weight_sync_backend=nccl",
            "generator.backend=vllm",
        ],
        ["generator.weight_sync_backend=nccl", "colocate_all"],
    ),
}

#: What real steps show.
STEPS: dict[str, tuple[list[str], list[str]]] = {
    "a column missing late": (
        ["data.train_data=[{x}/late.jsonl]"],
        ["data row 16", "'prompt'", "must be a string"],
    ),
    "a reward that raises late": (
        ["environment.reward_funcs=[{x}/parts.py:late]", "environment.max_retries=0"],
        ["parts.py:late", "no answer to compare with"],
    ),
    "reward that returns a pair": (
        ["environment.reward_funcs=[{x}/parts.py:with_length]"],
        ["with_length", "number"],
    ),
    "template without tools": (
        ["environment.env_class={x}/parts.py:Tools", "environment.reward_funcs=[]"],
        ["look_up", "data.chat_template"],
    ),
    "a name that the engine lacks": (
        ["trainer.strategy={x}/parts.py:Renamed"],
        ["model.last_norm.weight"],
    ),
}
MACHINE = ["--gpus", "16", "--gpu-memory", "1GiB", "--host-memory", "64GiB"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    model = make_model(folder / "model")
    shape = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps(shape))
    for name in ("no_template", "no_tokenizer", "two_labels"):
        shutil.copytree(model, folder / name)
    (folder / "no_template" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / name).unlink()
    two = shape | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "two_labels" / "config.json").write_text(json.dumps(two))
    lines = [json.dumps(row) for row in ROWS * 4]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "late.jsonl").write_text(
        "\n".join([*lines[:16], '{"promt": "one?", "answer": "two"}', *lines])
    )
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"prompt": "x"\n')
    message = {"prompt": [{"role": "user", "content": "one?"}], "answer": "two"}
    (folder / "messages.jsonl").write_text(json.dumps(message))
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    (folder / "strict.jinja").write_text(refuses + TEMPLATE)
    (folder / "parts.py").write_text(PARTS)
    (folder / "imports.py").write_text("import sympyy\n\ndef score(response):\n    return 0.0\n")
    return folder


def arguments(overrides: list[str], folder: Path) -> list[str]:
    usual = {
        "trainer.policy.model.path": f"{folder}/model",
        "data.train_data": f"[{folder}/rows.jsonl]",
        "trainer.plan": "one_step_off",
        "trainer.placement.policy_num_gpus_per_node": "8",
        "generator.num_inference_engines": "8",
        "generator.backend": "transformers",
        "generator.sampling_params.max_generate_length": "1024",
        "trainer.max_prompt_length": "64",
        "trainer.train_batch_size": "256",
        "environment.env_class": "reward",
        "environment.reward_funcs": f"[{folder}/parts.py:fine]",
    }
    given = dict(text.replace("{x}", str(folder)).split("=", 1) for text in overrides)
    return [f"{key}={value}" for key, value in {**usual, **given}.items()]


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a rehearsal ends."""
    with pytest.raises(SystemExit) as ended:
        command(["rehearse", *argv])
    assert ended.value.code in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines
    return "\n".join(lines)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(*_: object, **__: object) -> None:
        raise AssertionError("processes start")

    monkeypatch.setattr(skyasync.run.ray_cluster, "cluster", starts)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("fault", NAMED)
def test_a_planted_fault_is_named_before_anything_starts(
    fault: str, planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, named = NAMED[fault]
    lines = answer(arguments(overrides, planted), capsys)
    assert any(all(text in line for text in named) for line in lines.splitlines()), lines


@pytest.mark.matrix
@pytest.mark.usefixtures("no_process")
def test_too_little_memory_is_named_by_the_plan_of_the_full_size(
    planted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyasync.planning.advise", lambda *_: {})  # which measures other settings
    long = ["generator.sampling_params.max_generate_length=1000000"]
    with pytest.raises(AssertionError, match="processes start"):
        command(["rehearse", *arguments(long, planted), *MACHINE])
    said = capsys.readouterr().out
    assert re.search(
        r"does not fit: policy \(in its phase '.*'\) lacks .*: (it fits with|no key tried)", said
    ), said


@pytest.mark.matrix
@pytest.mark.parametrize("fault", STEPS)
def test_a_planted_fault_is_named_by_the_steps(
    fault: str, ray_session: None, planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, named = STEPS[fault]
    line = answer(arguments(overrides, planted), capsys)
    assert all(text in line for text in named), line


def test_there_are_forty() -> None:
    assert len(NAMED) + len(STEPS) + 1 == 40
