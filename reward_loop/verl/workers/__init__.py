"""What runs in actors beside the trainer: agent loop workers, reward workers, and what they load."""
