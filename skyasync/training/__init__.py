"""What a trainer is composed of: the learner, the hand-over of weights, refill, saving, phases."""
