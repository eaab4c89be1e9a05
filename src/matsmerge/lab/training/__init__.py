"""Fine-tuning on tasks, and the baselines that are not merges."""
