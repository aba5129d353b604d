"""OpenRLHF's agent files: every documented form of a step, and the messages for errors."""

import asyncio
import textwrap

import pytest

from skyasync import BasePPOExp
from skyasync.config import load_config
from skyasync.envs.base import InvalidEnvOutputError
from skyasync.errors import UserError
from skyasync.interop.openrlhf import SYSTEM
from skyasync.interop.openrlhf.agent_file import PATH_KEY, OpenRLHFAgent, settle_agent_file
from skyasync.registry import resolve_reference

FUNCTION_WITH_TUPLE = """
    import torch

    step_idx = 0

    async def step(state, action, label, **kwargs):
        global step_idx
        step_idx += 1
        done = step_idx == 2
        reward = torch.tensor([1.0]) if action == label else torch.tensor(0)
        return reward, state + action + " again: ", done, {"tries": step_idx}
"""
FUNCTION_WITH_DICTIONARY = """
    import torch

    step_idx = 0

    async def step(observation, action, label, **kwargs):
        global step_idx
        step_idx += 1
        reward = torch.tensor([float(action == label)])
        return {"rewards": reward, "scores": reward, "next_observation": observation + action + " again: ",
                "done": step_idx == 2, "sampling_params": kwargs.get("sampling_params"),
                "extra_logs": {"tries": torch.tensor(step_idx)}}
"""
INSTANCE = """
    import torch
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class AgentInstance(AgentInstanceBase):
        async def __init__(self, *args, **kwargs):
            self.step_idx = 0

        async def reset(self, states, **kwargs):
            return {"observation": states["observation"]}

        async def step(self, states, **kwargs):
            self.step_idx += 1
            assert states["observation_text"].startswith("2+2=")
            reward = torch.tensor(float(states["action_text"] == states["label"]))
            return {"rewards": reward, "scores": reward, "environment_feedback": " again: ",
                    "done": self.step_idx == 2, "sampling_params": states.get("sampling_params", None),
                    "extra_logs": {"tries": torch.tensor(self.step_idx)}}

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)
"""


@pytest.fixture
def agent(tmp_path):
    def make(code):
        file = tmp_path / "agent_func.py"
        file.write_text(textwrap.dedent(code))
        return OpenRLHFAgent({PATH_KEY: str(file)}, {"label": "4"})

    return make


@pytest.mark.parametrize("form", [FUNCTION_WITH_TUPLE, FUNCTION_WITH_DICTIONARY, INSTANCE])
def test_every_form_plays_the_same_episode(form, agent):
    env = agent(form)

    async def episode():
        text, _ = await env.init("2+2=")
        return text, await env.step("5"), await env.step("4")

    text, first, second = asyncio.run(episode())
    assert text == "2+2="
    assert (first["observations"], first["reward"], first["done"]) == (" again: ", 0.0, False)
    assert (second["reward"], second["done"]) == (1.0, True)
    assert env.get_metrics()["tries"] == 2.0


def test_every_episode_has_the_files_globals_to_itself(agent):
    first = agent(FUNCTION_WITH_TUPLE)
    second = OpenRLHFAgent(first.env_config, {"label": "4"})

    async def episodes():
        for env in (first, second):
            await env.init("")
        return [(await env.step("4"))["done"] for env in (first, second, first, second)]

    assert asyncio.run(episodes()) == [False, False, True, True]


def test_a_step_may_change_how_the_next_action_is_sampled(agent):
    env = agent("""
        class Params:
            temperature, best_of = 0.5, 3

        def step(state, action, label, **kwargs):
            return {"rewards": 0, "environment_feedback": "", "done": False, "sampling_params": Params()}
    """)
    asyncio.run(env.init(""))
    assert asyncio.run(env.step(""))["sampling_params"] == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1.0", "must return"),
        ("{'rewards': 1}", "lacks done"),
        ("{'rewards': 1, 'done': False}", "none of environment_feedback"),
        ("{'rewards': 1, 'done': False, 'environment_feedback': 3}", "must be text"),
        ("(1, 'something else', False, {})", "must begin with the state and the action"),
    ],
)
def test_a_step_in_no_known_form_is_told(returned, problem, agent):
    env = agent(f"async def step(state, action, label, **kwargs):\n    return {returned}\n")
    asyncio.run(env.init("question"))
    with pytest.raises(InvalidEnvOutputError, match=problem):
        asyncio.run(env.step("answer"))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = 1", "defines neither AgentInstance nor step"),
        (
            INSTANCE + "\n        async def execute(self, prompt):\n            pass\n",
            "agent_program",
        ),
    ],
)
def test_a_file_without_an_agent_that_can_be_played_is_refused(code, problem, agent):
    with pytest.raises(UserError, match=problem):
        agent(code)


def test_a_file_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    cfg = load_config([f"generator.agent_func_path={tmp_path}/agent.py"])
    with pytest.raises(UserError, match=r"generator\.agent_func_path=.*agent\.py does not exist"):
        BasePPOExp(cfg).prepare()


@pytest.mark.parametrize(
    "parameters",
    ["state, action, label", "state, action, label, sampling_params", "state, action, label, **kwargs",
     "state: str, action, label=None, *, sampling_params=None",
     "*everything", "state, action, label, n: int = len('x')"],
)  # fmt: skip
def test_a_step_is_given_what_its_signature_takes(parameters, agent, tmp_path):
    taken = "sampling_params" in parameters or "**" in parameters
    answer = (
        "sampling_params if 'sampling_params' in vars() else kwargs['sampling_params']"
        if taken
        else "None"
    )
    env = agent(
        f"async def step({parameters}):\n    assert bool({answer}) is {taken}\n    return 1.0, '', True\n"
    )
    settle_agent_file(load_config([f"generator.agent_func_path={tmp_path}/agent_func.py"]))
    asyncio.run(env.init("question"))
    assert asyncio.run(env.step("answer"))["reward"] == 1.0


@pytest.mark.parametrize(
    "parameters", ["state, action", "state, action, label, tools", "state, *, action, label"]
)
def test_a_step_that_cannot_be_called_is_refused_before_anything_starts(parameters, tmp_path):
    file = tmp_path / "agent_func.py"
    file.write_text(f"async def step({parameters}):\n    return 1.0, '', True\n")
    cfg = load_config([f"generator.agent_func_path={file}"])
    with pytest.raises(
        UserError,
        match=r"agent_func\.py: step\(.*\) cannot be called as step\(state, action, label",
    ):
        BasePPOExp(cfg).prepare()


def test_the_key_makes_it_the_environment_of_rows_that_name_none(tmp_path):
    file = tmp_path / "agent.py"
    file.touch()
    cfg = load_config([f"generator.agent_func_path={file}", "environment.env_config.size=4"])
    settle_agent_file(cfg)
    assert cfg.environment.env_class == "openrlhf"
    assert cfg.environment.env_config.items() >= {"size": 4, PATH_KEY: str(file)}.items()


def test_settings_of_an_earlier_run_that_name_the_program_are_settled_again(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("class AgentExecutor:\n    async def execute(self, prompt): ...\n")
    cfg = load_config(
        [f"generator.agent_func_path={file}", f"generator.agent_program={SYSTEM.agent_program}"]
    )
    settle_agent_file(cfg)
    assert (cfg.generator.agent_program, cfg.environment.env_class) == (SYSTEM.agent_program, "")
    assert callable(resolve_reference(cfg.generator.agent_program, kind="program"))


def test_an_agent_program_together_with_an_agent_file_is_rejected(tmp_path):
    with pytest.raises(
        UserError, match=r"agent_program=skyasync\.examples:play plays the episodes"
    ):
        load_config(
            [
                f"generator.agent_func_path={tmp_path}",
                "generator.agent_program=skyasync.examples:play",
            ]
        )
