"""What drives an episode: functions of the user's own, in worker processes, and the tools they call."""
