import pytest

from skyasync.envs import ENVS, BaseTextEnv, env_factory, make, register
from skyasync.envs.reward import GSM8kEnv
from skyasync.errors import UserError


class Mine(BaseTextEnv):
    pass


def test_an_environment_is_found_by_id_by_reference_or_through_a_registered_reference():
    register("mine", Mine)
    register("mine-too", f"{__name__}:Mine")
    try:
        assert env_factory("mine") is Mine
        assert (
            env_factory("mine-too").__name__ == env_factory(f"{__name__}:Mine").__name__ == "Mine"
        )
        assert env_factory("gsm8k") is GSM8kEnv
    finally:
        del ENVS["mine"], ENVS["mine-too"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gsm8", "gsm8k"), ("skyasync.envs.reward:GSM8Env", "GSM8kEnv"), ("no:x", "no")],
)
def test_a_wrong_name_is_refused_with_a_hint(name, hint):
    with pytest.raises(UserError, match=hint):
        env_factory(name)


def test_an_environment_can_be_made_and_played_by_hand():
    env = make("gsm8k", extras={"reward_spec": {"ground_truth": "7"}})
    assert isinstance(env, GSM8kEnv)
    prompt, _ = env.init([{"role": "user", "content": "3 + 4?"}])
    assert prompt == [{"role": "user", "content": "3 + 4?"}]
    assert env.step("#### 7")["reward"] == 1.0
