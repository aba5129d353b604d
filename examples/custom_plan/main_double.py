"""A user's plan: two training steps per weight sync, while the next two batches are generated.

python -m examples.custom_plan.main_double [key=value ...]
python -m skyasync trainer.plan=examples.custom_plan.main_double:TwoStepsPerSync [key=value ...]

| who waits       | for what                        | woken by                                               |
|-----------------|---------------------------------|--------------------------------------------------------|
| generation loop | room for two batches in a queue | training loop, which takes one per step                |
| training loop   | a batch in the queue            | generation loop, which never waits while it is empty   |

A weight update pauses the engines for a moment. Two generated batches are in the queue and one is
being generated, and weights change every other step: the staleness of a sample is at most 4.
"""

import asyncio

from skyasync import BasePPOExp, RayPPOTrainer, main
from skyasync.utils.task_group import run_together


class TwoStepsPerSync(RayPPOTrainer):
    asynchronous = True  # engines generate while the policy is updated
    # Settings that have an effect in this plan: engines are busy during updates and evaluations.
    reads = ("trainer.partial_rollout", "trainer.eval_mode")

    async def train(self):
        batches = asyncio.Queue(maxsize=2)  # bounds the staleness
        # An error in one loop ends both.
        await run_together(self._generate_batches(batches), self._train_twice(batches))

    async def _generate_batches(self, batches):
        for prompts in self.remaining_prompts():
            batch = await self.generate(prompts)
            await batches.put(batch)  # waits while the queue is full

    async def _train_twice(self, batches):
        total = self.total_steps
        while self.global_step < total:
            batch = await self.waiting("data", batches.get())  # its time is a metric
            status = await self.train_on(batch)
            if self.global_step % 2 == 0 or self.global_step == total:
                await self.async_sync_policy_weights_to_inference_engines()
            await self.end_step(status)  # metrics, checkpoint, evaluation


class TwoStepsExp(BasePPOExp):
    def get_trainer(self, cfg, tracker, tokenizer, train_dataset, eval_dataset,
                    inference_engine_client, generator, colocate_pg):  # fmt: skip
        return TwoStepsPerSync.get_trainer(
            cfg=cfg, tracker=tracker, tokenizer=tokenizer,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client, generator=generator, colocate_pg=colocate_pg,
        )  # fmt: skip


if __name__ == "__main__":
    main(TwoStepsExp)
