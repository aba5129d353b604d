"""The inference client that generators of SkyRL's are given."""

from types import SimpleNamespace

from skyasync.inference.interface import GenerationOutput, GenerationRequest, SamplingParams
from skyasync.interop.skyrl.generators import InferenceEngineClient, as_dictionary


async def test_a_batch_is_sampled_independently_with_a_seed_and_fits_in_what_is_free() -> None:
    sent: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> GenerationOutput:
        sent.append(request)
        return GenerationOutput(request.request_id, [5], [-0.5], [0], "stop")

    tokenizer = SimpleNamespace(decode=lambda tokens, **options: "x")
    sampling = SamplingParams(max_tokens=64, min_tokens=16, seed=7)
    client = InferenceEngineClient(SimpleNamespace(generate=generate), lambda: tokenizer, SamplingParams(), 20)
    batch = {"prompt_token_ids": [[1, 2]] * 4 + [[1] * 12], "sampling_params": as_dictionary(sampling)}
    answers = await client.generate(batch)
    assert answers["response_ids"] == [[5]] * 5
    assert len({request.sampling.seed for request in sent}) == 5, "the run's seed and each request's name"
    assert [request.sampling.max_tokens for request in sent] == [18] * 4 + [8]
    assert all(request.sampling.min_tokens <= request.sampling.max_tokens for request in sent)
