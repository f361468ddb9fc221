"""The engines that serve reward models, and how their processes live and end."""
