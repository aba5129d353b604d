"""A trainer with hooks in SkyRL's form: a penalty for long answers, and advantages scaled by length."""

import torch

from skyasync.interop.skyrl import BasePPOExp, GeneratorOutput, RayPPOTrainer, SkyRLNames, TrainingInputBatch


class LengthHooks(SkyRLNames):
    @torch.no_grad()
    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]):
        rewards = generator_output["rewards"]
        assert not isinstance(rewards[0], list), "rewards come as one number per answer"
        lengths = [len(response) for response in generator_output["response_ids"]]
        generator_output["rewards"] = [r - 0.125 * n for r, n in zip(rewards, lengths, strict=True)]
        self.all_metrics.update({"mine/penalty": 0.125 * sum(lengths) / len(lengths)})
        return super().postprocess_generator_output(generator_output, uids)

    @torch.no_grad()
    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        data = super().compute_advantages_and_returns(data)
        mask, rewards = data["response_mask"], data["rewards"]
        assert mask.shape == rewards.shape == data["advantages"].shape
        assert data["sequences"].shape[1] >= mask.shape[1] == data.metadata["response_length"]
        assert len(data.metadata["uids"]) == len(data)
        lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        data["advantages"] = data["advantages"] / lengths
        data["returns"] = data["advantages"].clone()
        self.all_metrics["mine/advantage"] = data["advantages"].abs().sum().item()
        return data


class LengthTrainer(LengthHooks, RayPPOTrainer):
    """With SkyRL's own loop."""


class LengthExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return LengthTrainer(*args, **kwargs)
