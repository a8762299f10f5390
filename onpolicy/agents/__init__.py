"""Agents: functions of the user's that drive episodes, in worker processes, and the tools they
call."""
