"""A generator that calls the model over HTTP, as an agent harness does, and tokenizes the result."""

import asyncio

import aiohttp

from skyasync.interop.skyrl import BasePPOExp, GeneratorInterface


class OverHttp(GeneratorInterface):
    def __init__(self, inference_engine_client, tokenizer):
        self.inference_engine_client, self.tokenizer = inference_engine_client, tokenizer
        self.base_url = f"{inference_engine_client.get_endpoint_url()}/v1"

    async def ask(self, http, messages):
        body = {"model": "policy", "messages": messages, "return_token_ids": True}
        async with http.post(f"{self.base_url}/chat/completions", json=body) as response:
            answer = await response.json()
            return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]

    async def generate(self, input_batch):
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer EMPTY"}) as http:
            found = await asyncio.gather(*(self.ask(http, messages) for messages in input_batch["prompts"]))
        return {
            "prompt_token_ids": [prompt for prompt, _ in found],
            "response_ids": [response for _, response in found],
            "rewards": [float(sum(response) % 2) for _, response in found],
            "loss_masks": [[1] * len(response) for _, response in found],
            "stop_reasons": None,
            "rollout_metrics": None,
            "rollout_logprobs": None,
        }


class HttpExp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return OverHttp(inference_engine_client, tokenizer)
