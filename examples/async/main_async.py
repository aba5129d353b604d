"""Training one step off policy: only the plan differs from the base experiment.

uv run -m examples.async.main_async [key=value ...]
"""

from skyasync import AsyncRayPPOTrainer, BasePPOExp, main


class AsyncPPOExp(BasePPOExp):
    def get_trainer(self, cfg, tracker, tokenizer, train_dataset, eval_dataset,
                    inference_engine_client, generator, colocate_pg):  # fmt: skip
        return AsyncRayPPOTrainer.get_trainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )


if __name__ == "__main__":
    main(AsyncPPOExp, plan="one_step_off")
