"""An executor that returns tokens which the engine did not generate."""

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    async def execute(
        self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
    ):
        output = await super().execute(
            prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        )
        start, _end = output["action_ranges"][0]
        output["observation_tokens"][start] ^= 1
        return {**output, "reward": 1.0}
