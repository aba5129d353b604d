"""The unchanged classes of the tutorial on asynchronous training."""

import asyncio

from skyasync import BasePPOExp, RayPPOTrainer


class AsyncRayPPOTrainer(RayPPOTrainer):
    async def train(self):
        # Assert non-colocated training
        assert not self.cfg.trainer.placement.colocate_all, (
            "colocate_all is not supported for async training"
        )

        # Create buffer of size 1 for generated trajectories.
        generation_buffer = asyncio.Queue(maxsize=1)

        # Start generator task asynchronously.
        generator_task = asyncio.create_task(self._run_generate_loop(generation_buffer))  # noqa: F841, RUF006

        # Training loop consumes from buffer
        for idx in range(len(self.train_dataloader)):
            # Training starts when generation buffer is filled.
            status = await self._run_training(generation_buffer)  # noqa: F841
            # Trainer waits for generation to complete before next training step.
            if idx != len(self.train_dataloader) - 1:
                await self.generation_ack.wait()
            # Synchronize weights after training.
            await self.async_sync_policy_weights_to_inference_engines()
            # Signal that weight sync is done, ready for next round of generation.
            self.sync_finished.set()
            self.generation_ack.clear()


class AsyncPPOExp(BasePPOExp):
    def get_trainer(self, cfg, tracker, tokenizer, train_dataset, eval_dataset,
                    inference_engine_client, generator, colocate_pg):  # fmt: skip
        # Construct the new trainer class.
        return AsyncRayPPOTrainer(
            cfg=cfg, tracker=tracker, tokenizer=tokenizer,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client, generator=generator,
            colocate_pg=colocate_pg
        )  # fmt: skip
