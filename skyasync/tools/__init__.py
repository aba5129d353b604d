"""What one does beside training: look at data and models, play prompts, score, export, replay, list runs."""
