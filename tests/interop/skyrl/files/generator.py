"""A user's generator: two samples of a batch in one call of the client, rewarded without an environment."""

from skyasync.interop.skyrl import BasePPOExp, GeneratorInput, GeneratorInterface, GeneratorOutput


class Plain(GeneratorInterface):
    def __init__(self, client, tokenizer):
        self.inference_engine_client, self.tokenizer = client, tokenizer
        self.base_url = client.get_endpoint_url() + "/v1"

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        ids = input_batch["trajectory_ids"]
        assert len({trajectory.to_string() for trajectory in ids}) == len(ids)
        prompts = [
            self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
            for prompt in input_batch["prompts"]
        ]
        sampling = dict(input_batch["sampling_params"])
        sampling["max_tokens"] = 5
        output = await self.inference_engine_client.generate(
            {
                "prompt_token_ids": prompts,
                "sampling_params": sampling,
                "session_ids": [trajectory.instance_id for trajectory in ids],
            }
        )
        return {
            "prompt_token_ids": prompts,
            "response_ids": output["response_ids"],
            "rewards": [
                float(len(text) % 2) + trajectory.repetition_id
                for text, trajectory in zip(output["responses"], ids, strict=True)
            ],
            "loss_masks": [[1] * len(tokens) for tokens in output["response_ids"]],
            "stop_reasons": output["stop_reasons"],
            "rollout_metrics": {"generate/phase": input_batch["batch_metadata"].training_phase == "train"},
            "rollout_logprobs": output["response_logprobs"],
        }


class PlainExp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return Plain(inference_engine_client, tokenizer)
