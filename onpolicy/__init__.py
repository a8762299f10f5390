"""onpolicy: reinforcement learning whose rollout and training agree to the last bit."""

from onpolicy import torchvision_ops

torchvision_ops.install()
