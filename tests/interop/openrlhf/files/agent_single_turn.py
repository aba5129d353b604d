"""One answer, rewarded by a reward file, with a bonus of the executor's own."""

from pathlib import Path

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__(str(Path(__file__).with_name("reward_list.py")))

    async def execute(self, sampling_params, **given):
        sampling_params.max_tokens = 4
        output = await super().execute(sampling_params=sampling_params, **given)
        output["reward"] += 10.0
        output["extra_logs"]["cut"] = float(output["truncated"])
        return output
