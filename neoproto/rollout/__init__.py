"""What is known of rollout engines before one is built: by the configuration, its checks and a run's plan."""
