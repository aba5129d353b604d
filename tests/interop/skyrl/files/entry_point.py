"""A program in SkyRL's style: it registers a loss, starts Ray, and runs the experiment in a task."""

import sys

import ray

from skyasync.interop.skyrl import BasePPOExp, PolicyLossRegistry, SkyRLTrainConfig, initialize_ray, validate_cfg


def plain(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return -(log_probs * advantages * loss_mask).sum(), {"mine": 3.0}


PolicyLossRegistry.register("peers_plain", plain)


@ray.remote(num_cpus=1)
def entry_point(cfg: SkyRLTrainConfig):
    BasePPOExp(cfg).run()


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(entry_point.remote(cfg))


if __name__ == "__main__":
    main()
