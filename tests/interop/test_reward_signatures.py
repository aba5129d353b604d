"""Reward functions of OpenRLHF, AReaL, TRL and verl: called as in their framework, with their answers understood."""

import asyncio
import sys
import threading

import pytest
from aiohttp import web

from skyasync.envs.base import TurnTokens
from skyasync.envs.reward import RewardEnv
from skyasync.errors import UserError
from skyasync.interop.openrlhf import rewards as remote
from skyasync.interop.openrlhf.user_modules import extract_boxed_answer, grade_answer, stand_ins
from skyasync.rewards.reward_functions import RewardFunction, score_response
from skyasync.rewards.settings import ENV_KEY, RewardSettings, short_names
from skyasync.rewards.signature import signature_of

SEEN = TurnTokens("<user>2+2=<eos>", "four<eos>", [1, 2, 3], [4, 5])


def rewarded_by(func, **extras):
    env = RewardEnv(
        {ENV_KEY: RewardSettings(funcs=(func,), timeout_s=20.0, on_timeout="raise")}, extras
    )
    assert env.sees_tokens(env.env_config, extras)
    env.init([{"role": "user", "content": "2+2="}])
    env.seen = SEEN
    return env.step("four"), env.get_metrics()


def file_with(tmp_path, code):
    file = tmp_path / "reward_func.py"
    file.write_text(code)
    return f"{file}:reward_func"


@pytest.mark.parametrize(
    "returned",
    [
        "torch.tensor([2.0])",
        "[2.0]",
        "torch.tensor([[2.0]])",
        "{'rewards': torch.tensor([2.0]), 'scores': [1.0], 'extra_logs': {'length': torch.tensor(4.0), 'why': 'good'}}",
    ],
)
def test_a_batch_function_gets_lists_and_may_return_any_documented_form(returned, tmp_path):
    code = f"""
import torch

def reward_func(queries, prompts, labels, **kwargs):
    assert queries == ['<user>2+2=<eos>four<eos>'] and not torch.is_tensor(queries)
    assert prompts == ['<user>2+2=<eos>'] and labels == ['4']
    return {returned}
"""
    step, metrics = rewarded_by(file_with(tmp_path, code), label="4")
    assert step["reward"] == 2.0
    if "scores" in returned:
        assert (metrics["reward_func/score"], metrics["reward_func/length"]) == (1.0, 4.0)
        assert "reward_func/why" not in metrics


def test_a_batch_function_that_answers_for_several_is_refused(tmp_path):
    code = "def reward_func(queries, prompts, labels):\n    return [1.0, 2.0]\n"
    with pytest.raises(UserError, match=r"reward_func is \[1.0, 2.0\]"):
        rewarded_by(file_with(tmp_path, code), label="4")


def test_areals_parameters(tmp_path):
    code = (
        "def reward_func(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):\n"
        "    assert prompt == '<user>2+2=<eos>' and completions == 'four' and kwargs['source'] == 'book'\n"
        "    assert prompt_ids == [1, 2, 3] and completion_ids == [4, 5] and 'queries' not in kwargs\n"
        "    return float(answer == '4')\n"
    )
    for columns in ({"answer": "4"}, {"label": "4"}):
        assert rewarded_by(file_with(tmp_path, code), source="book", **columns)[0]["reward"] == 1.0


def test_a_function_that_looks_at_no_tokens_is_shown_none():
    assert not RewardFunction.of("exact_match").looks_at_tokens
    assert not RewardEnv.sees_tokens({ENV_KEY: RewardSettings(funcs=("exact_match",))}, {})


def scored(func, **extras):
    env = RewardEnv(
        {ENV_KEY: RewardSettings(funcs=(func,), timeout_s=20.0, on_timeout="raise")}, extras
    )
    if env.sees_tokens(env.env_config, extras):
        env.seen = SEEN
    env.init([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}])
    return env.step("four")["reward"], env.get_metrics()


def test_trls_lists_of_text_with_the_columns(tmp_path):
    code = (
        "def reward_func(prompts, completions, ground_truth, log_metric, **kwargs):\n"
        "    assert prompts == ['2+2='] and kwargs['source'] == ['book'] and kwargs['label'] == [None]\n"
        "    log_metric('length', len(completions[0]))\n"
        "    return [1.0 if c == g else 0.0 for c, g in zip(completions, ground_truth)]\n"
    )
    reward, metrics = scored(file_with(tmp_path, code), ground_truth="four", source="book")
    assert (reward, metrics["reward_func/length"]) == (1.0, 4.0)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_trls_conversations_and_tokens(kind, tmp_path):
    code = (
        f"{kind} reward_func(prompts, completions, completion_ids, trainer_state=None, **kwargs):\n"
        "    assert [m['role'] for m in prompts[0]] == ['system', 'user'] and completion_ids == [[4, 5]]\n"
        "    kwargs['log_extra']('words', ['one'])\n"
        "    return [float(len(completion[0]['content'])) for completion in completions]\n"
    )
    assert scored(file_with(tmp_path, code), prompt_is_conversation=True)[0] == 4.0


def test_a_trl_function_that_does_not_apply_counts_as_0_and_is_no_metric(tmp_path):
    reward, metrics = scored(
        file_with(tmp_path, "def reward_func(completions, **kwargs):\n    return [None]\n")
    )
    assert reward == 0.0 and "reward_func" not in metrics


def test_a_trl_function_that_answers_for_several_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"reward_func is \[1.0, 2.0\]"):
        scored(
            file_with(tmp_path, "def reward_func(completions, **kwargs):\n    return [1.0, 2.0]\n")
        )


@pytest.mark.parametrize(
    "extras",
    [
        {"data_source": "math", "ground_truth": "four", "extra_info": {"index": 3}},
        {
            "data_source": "math",
            "reward_model": {"style": "rule", "ground_truth": "four"},
            "extra_info": {"index": 3},
        },
    ],
)
def test_verls_parameters_and_its_dictionary(extras, tmp_path):
    code = (
        "def reward_func(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    assert data_source == 'math' and extra_info == {'index': 3}\n"
        "    right = solution_str == ground_truth\n"
        "    return {'score': right, 'acc': right, 'pred': solution_str}\n"
    )
    reward, metrics = scored(file_with(tmp_path, code), **extras)
    assert (reward, metrics["reward_func/acc"]) == (1.0, 1.0) and "reward_func/pred" not in metrics


def test_verls_number_without_the_optional_columns(tmp_path):
    code = "def reward_func(data_source, solution_str, ground_truth, extra_info=None):\n    return solution_str == '4'\n"
    assert scored(file_with(tmp_path, code), label="4")[0] == 0.0


@pytest.mark.parametrize(
    ("parameters", "form"),
    [
        ("response, label", ""),
        ("response, completions", ""),  # a user's column
        ("queries, prompts, labels", "openrlhf"),
        ("prompt, completions, prompt_ids, completion_ids, answer, **kwargs", "areal"),
        ("completions, **kwargs", "trl"),
        ("completions, prompt_ids, **kwargs", "trl"),
        ("prompts, completions, ground_truth", "trl"),
        ("data_source, solution_str, ground_truth, extra_info=None", "verl"),
        ("response, ground_truth, data_source", ""),
    ],
)
def test_the_signature_decides_the_form(parameters, form):
    assert signature_of(eval(f"lambda {parameters}: 0")).name == form


def test_openrlhfs_modules_exist_only_while_its_file_loads(tmp_path):
    code = (
        "import torch\nfrom openrlhf.utils import extract_boxed_answer, grade_answer\n"
        "from openrlhf.utils.logging_utils import init_logger\nlogger = init_logger(__name__)\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    return torch.tensor([float(grade_answer(extract_boxed_answer(q + '\\\\boxed{4}'), l))"
        " for q, l in zip(queries, labels)])\n"
    )
    assert rewarded_by(file_with(tmp_path, code), label="4.0")[0]["reward"] == 1.0
    assert "openrlhf" not in sys.modules
    with stand_ins():
        import openrlhf.utils  # type: ignore[import-not-found]
    assert openrlhf.utils.grade_answer is grade_answer
    assert "openrlhf.utils" not in sys.modules


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} \boxed{\frac{1}{2}}!", r"\frac{1}{2}"),
        ("4", None),
        (r"\boxed{4", None),
    ],
)
def test_what_is_boxed(text, answer):
    assert extract_boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [("4", "4.0", True), ("1,000", "1000", True), (r"\frac{1}{2}", "0.5", True), ("5", "4", False), (None, "4", False),
     ("x", "y", False)],
)  # fmt: skip
def test_grades(given, truth, same):
    assert grade_answer(given, truth) is same


class Server:
    """A real reward model's server; ``fails`` calls get an error."""

    def __init__(self, answer, fails=0):
        self.answer, self.fails, self.asked = answer, fails, []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()}/get_reward"

    async def _start(self):
        app = web.Application()
        app.router.add_post("/get_reward", self._reward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    async def _reward(self, request):
        self.asked.append(await request.json())
        if len(self.asked) <= self.fails:
            raise web.HTTPServiceUnavailable
        return web.json_response(self.answer)


def test_a_reward_server_is_asked_with_openrlhfs_json_and_again_if_it_fails(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    server = Server(
        {"rewards": [0.5], "scores": [1.0], "extra_logs": {"dummy_scores": [2.0]}}, fails=2
    )
    step, metrics = rewarded_by(server.url, label="4")
    assert step["reward"] == 0.5
    assert metrics["remote_reward/score"] == 1.0
    assert metrics["remote_reward/dummy_scores"] == 2.0
    assert (
        server.asked
        == [
            {"query": ["<user>2+2=<eos>four<eos>"], "prompts": ["<user>2+2=<eos>"], "labels": ["4"]}
        ]
        * 3
    )


def test_servers_of_one_model_take_turns_and_stand_in_for_each_other(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    good, bad = Server([1.0]), Server([0.0], fails=100)
    for _ in range(4):
        assert rewarded_by(f"{good.url},{bad.url}", label="4")[0]["reward"] == 1.0
    assert len(good.asked) == 4 and len(bad.asked) == 2
    with pytest.raises(RuntimeError, match=r"(?s)did not answer in 5 tries; the last: http.*503"):
        rewarded_by(bad.url, label="4")


def test_metrics_of_a_server_have_a_name():
    assert short_names(["http://host:1/a", "m:f"]) == ["remote_reward", "f"]


def test_a_row_without_tokens_says_what_the_function_needs(tmp_path):
    with pytest.raises(UserError, match="needs 'labels'"):
        score_response(
            [
                RewardFunction.of(
                    file_with(
                        tmp_path, "def reward_func(queries, prompts, labels):\n    return [1]\n"
                    )
                )
            ],
            {},
            5.0,
        )
