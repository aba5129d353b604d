"""A user's loop on tokens: two drafts; the longer one is trained, the other is not."""

from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(
        self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None
    ):
        tokens = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ][0].tolist()
        drafts = []
        for length in (3, 6):
            params = deepcopy(sampling_params)
            params.max_tokens, params.min_tokens = length, length
            request = await llm_engine.generate(tokens, params)
            drafts.append(request.outputs[0])
        best = max(drafts, key=lambda draft: len(draft.token_ids))
        known = [
            entry[token].logprob
            for token, entry in zip(best.token_ids, best.logprobs, strict=False)
        ]
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens + best.token_ids,
            "action_ranges": [(len(tokens), len(tokens) + len(best.token_ids))],
            "rollout_log_probs": [0.0] * len(tokens) + known,
            "reward": float(sum(best.token_ids) % 2),
            "scores": 1.0,
            "extra_logs": {"drafts": len(drafts)},
        }
