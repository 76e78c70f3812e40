"""What tests compute on: a GPU too where there is one."""

from __future__ import annotations

import torch

TORCH_DEVICES = ("torch:cpu", *(("cuda",) if torch.cuda.is_available() else ()))
DEVICES = ("cpu", *TORCH_DEVICES)
