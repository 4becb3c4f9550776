"""Many processes: `torch.distributed` on tensors of the device.

A collective is recorded as an instruction of the pending program and run by the physical device's process group, in
program order. Nothing here moves data between processes: gloo and NCCL do.
"""
